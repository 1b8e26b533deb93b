"""`kv=` from Python and the command line: what it does, and what it refuses in one line."""

from __future__ import annotations

from typing import Any

import pytest

import foretell
from foretell.cli import run
from foretell.errors import BadConfig, UnknownMethod

IDS = [(11 * i + i * i) % 8000 for i in range(40)]


@pytest.fixture(scope="module")
def lm() -> Any:
    return foretell.load("demo", dtype="float32", device="cpu", executor="torch")


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
    ],
)
def test_what_cannot_be_meant_is_refused(lm: Any, kv: str, message: str) -> None:
    with pytest.raises((BadConfig, UnknownMethod), match=message):
        lm.generate(IDS, "plain", max_new_tokens=2, kv=kv)


def test_a_method_that_looks_beyond_a_change_names_the_policy(lm: Any) -> None:
    with pytest.raises(BadConfig, match="superposed cannot run under the cache policy snapkv"):
        lm.generate(IDS, "superposed", max_new_tokens=4, kv="snapkv:budget=40")


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", "demo", "--max-new-tokens", "4", "a b c"]
    assert run([*asked, "--kv", "tova:budget=8"]) == 0
    assert capsys.readouterr().out
    assert run([*asked, "--kv", "tovas"]) == 2
    assert "did you mean tova" in capsys.readouterr().err
