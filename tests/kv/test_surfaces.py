"""`kv=` from Python and the command line: what it does, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.cli import run
from foretell.errors import BadConfig, UnknownMethod

IDS = [(11 * i + i * i) % 8000 for i in range(40)]


@pytest.fixture(scope="module")
def lm() -> Any:
    return foretell.load("demo", dtype="float32", device="cpu", backend="torch")


def test_a_spec_is_honoured_with_drafts_and_without(lm: Any) -> None:
    full = lm.generate(IDS, "plain", max_new_tokens=16)
    kept = lm.generate(IDS, "plain", max_new_tokens=16, kv="streaming-llm:sinks=1,window=6")
    drafted = lm.generate(IDS, "suffix", max_new_tokens=16, kv="streaming-llm:sinks=1,window=6")
    assert kept.tokens == drafted.tokens != full.tokens


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ("snapkw", "did you mean snapkv"),
        ("snapkv:budgets=3", "did you mean budget"),
        ("snapkv:budget=5", "snapkv:budget=5"),
        ("", "kv=''"),
        ("snapkv+gaer", "did you mean gear"),
        ("snapkv+h2o", "two evictors"),
        ("quest+gear", "quest reads the rows of one cache"),
        ("offload:dir=/dev/null", "offload:dir='/dev/null'"),
    ],
)
def test_what_cannot_be_meant_is_refused(lm: Any, kv: str, message: str) -> None:
    with pytest.raises((BadConfig, UnknownMethod), match=message):
        lm.generate(IDS, "plain", max_new_tokens=2, kv=kv)


@pytest.mark.parametrize("joined", [False, True])
def test_what_is_stored_in_files_is_gone_behind_the_answer(
    lm: Any, tmp_path: Path, joined: bool
) -> None:
    kept, folder = "snapkv:budget=20,window=8", f"offload:dir={tmp_path}/a+b,block=8"
    alone = lm.generate(IDS, "plain", max_new_tokens=16, kv=kept if joined else None)
    stored = lm.generate(
        IDS, "plain", max_new_tokens=16, kv=f"{kept}+{folder}" if joined else folder
    )
    assert stored.tokens == alone.tokens
    assert (tmp_path / "a+b").is_dir() and not [*(tmp_path / "a+b").iterdir()]


def test_a_method_that_looks_beyond_a_change_names_the_policy(lm: Any) -> None:
    with pytest.raises(BadConfig, match="superposed cannot run under the cache policy snapkv"):
        lm.generate(IDS, "superposed", max_new_tokens=4, kv="snapkv:budget=40")


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", "demo", "--max-new-tokens", "4", "a b c"]
    assert run([*asked, "--kv", "tova:budget=8"]) == 0
    assert capsys.readouterr().out
    assert run([*asked, "--kv", "gear:bits=2,buffer=4+offload"]) == 0
    assert capsys.readouterr().out
    assert run([*asked, "--kv", "tovas"]) == 2
    assert "did you mean tova" in capsys.readouterr().err
    assert run([*asked, "--kv", "tova+gear"]) == 2
    assert "tova gives up rows at every step" in capsys.readouterr().err
