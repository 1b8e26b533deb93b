"""`foretell train acceptance-head`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import acceptance_head
from tests import tiny

QUICK = ["--length", "30", "--examples", "200", "--epochs", "1"]


@pytest.fixture
def pair(folder: str, small: str) -> list[str]:
    return ["--model", folder, "--draft", small, "--executor", "torch"]


def test_a_head_of_answers_and_one_of_texts_can_be_used(
    run: Any, pair: list[str], tmp_path: Path
) -> None:
    rows: list[Any] = [{"prompt": text} for text in "abcdefgh"]
    rows.append({"messages": [{"role": "user", "content": "i"}]})  # of which it has no template
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.txt").write_text(" ".join(tiny.TEXTS) * 3)
    for name, source in (("one", ["--prompts", "p.jsonl"]), ("two", ["--text", "t.txt"])):
        head = tmp_path / f"{name}.safetensors"
        given = [source[0], str(tmp_path / source[1])]
        code, out, _ = run(
            "train", "acceptance-head", *pair, *given, "--out", str(head), *QUICK, "--json"
        )
        report = json.loads(out)
        assert code == 0 and report["file"] == str(head) and head.is_file()
        assert report["examples"] > 100 and 0 <= report["auc"] <= 1
        method = f"specdec-pp:head={head},nodes=6"
        code, out, _ = run(
            "generate", "def", *pair, "--method", method, "--max-new-tokens", "20", "--json"
        )
        assert code == 0 and json.loads(out)["stats"]["drafted"]
    code, out, _ = run("train", "acceptance-head", *pair, *given, "--out", str(head), *QUICK)
    assert code == 0 and out.count("\n") == 1 and f"specdec-pp:head={head}" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--out", "{tmp}/h"], "either --prompts FILE.jsonl or --text SOURCE"),
        (["--out", "{tmp}/h", "--text", "t", "--prompts", "p"], "either --prompts"),
        (["--out", "{tmp}", "--text", "t"], "a folder; name a file"),
        (["--out", "{tmp}/no/h", "--text", "t"], "does not exist"),
        (["--out", "{tmp}/h", "--prompts", "./none"], "none: cannot be read"),
        (["--out", "{tmp}/h", "--text", "./none"], "--text ./none"),
        (["--out", "{tmp}/h", "--text", "t", "--mixed", "2"], "mixed=2.0: must be between"),
        (["--out", "{tmp}/h", "--text", "{tmp}/short"], "the texts give 0 pieces"),
    ],
)
def test_mistakes_are_one_line(
    run: Any, pair: list[str], tmp_path: Path, args: list[str], said: str
) -> None:
    (tmp_path / "short").write_text("one two")
    given = [arg.replace("{tmp}", str(tmp_path)) for arg in args]
    code, out, err = run("train", "acceptance-head", *pair, *given)
    assert code == 2 and not out and said in err and err.count("\n") == 1


def test_a_pair_without_a_draft_model_is_told(run: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(" ".join(tiny.TEXTS) * 3)
    given = ["--text", str(tmp_path / "t.txt"), "--out", str(tmp_path / "h")]
    code, _, err = run("train", "acceptance-head", "--model", folder, *given)
    assert code == 2 and "name one with --draft" in err


def test_every_field_of_the_trainer_is_an_option() -> None:
    from foretell.train.acceptance import TrainHead

    options = {f.name: f.default for f in dataclasses.fields(acceptance_head.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainHead)}
