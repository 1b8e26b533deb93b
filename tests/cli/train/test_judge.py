"""`foretell train judge`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import judge


@pytest.fixture
def pair(folder: str, small: str) -> list[str]:
    return ["--model", folder, "--draft", small, "--executor", "torch"]


def test_a_judge_is_trained_and_used(
    run: Any, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model neither ends its answers nor says numbers: its walks are made here."""
    from foretell.train import judge as trainer

    def collected(lm: Any, tasks: Any, *rest: Any) -> list[trainer.Walk]:
        assert len(tasks) == 23
        walks = []
        for number in range(30):
            text = [3 + (number + i) % 9 for i in range(12)]
            judged = [(place, 3 + place, (place + number) % 3 > 0) for place in (4, 5, 8)]
            walks.append(trainer.Walk(text, 2, "x", 12, judged))
        return walks

    (tmp_path / "t.jsonl").write_text('{"question": "1 + 1?"}\n' * 3)
    given = ["--tasks", str(tmp_path / "t.jsonl"), "--own", "20", "--out", str(tmp_path / "o")]
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "collect", collected)
        code, out, err = run("train", "judge", *pair, *given, "--json")
        assert code == 0 and "23 tasks" in err and "hours" in err
        report = json.loads(out)
        assert report["labels"] == 90 and report["unimportant"] == pytest.approx(2 / 3, abs=0.1)
        code, out, _ = run("train", "judge", *pair, *given)
        assert code == 0 and out.count("\n") == 1 and "rule=judge,weights=" in out
    file = report["file"]
    for delta in ("0", "1"):
        method = f"draft:nodes=4,rule=judge,delta={delta},weights={file}"
        code, out, err = run(
            "generate", "def", *pair, "--method", method, "--max-new-tokens", "12", "--json"
        )
        assert code == 0, err
        if delta == "1":
            plain = run("generate", "def", *pair, "--method", "plain", "--json")[1]
            tokens = json.loads(out)["tokens"]
            assert tokens == json.loads(plain)["tokens"][: len(tokens)]
    code, _, err = run("generate", "def", *pair, "--method", "draft:rule=judge")
    assert code == 2 and "none ships for this model" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "give --tasks, or --own tasks"),
        (["--own", "-1"], "--own=-1: must be 0 or more"),
        (["--own", "5", "--labels", "3"], "labels=3: must be between"),
        (["--tasks", "./none"], "none: cannot be read"),
        (["--own", "2", "--answer-tokens", "4"], "0 tasks gave labels, too few"),
    ],
)
def test_mistakes_are_one_line(
    run: Any, pair: list[str], tmp_path: Path, args: list[str], said: str
) -> None:
    code, out, err = run("train", "judge", *pair, "--out", str(tmp_path / "o"), *args)
    assert code == 2 and not out and said in err


def test_a_pair_without_a_draft_model_is_told(run: Any, folder: str, tmp_path: Path) -> None:
    given = ["--own", "3", "--out", str(tmp_path / "o")]
    code, _, err = run("train", "judge", "--model", folder, *given)
    assert code == 2 and "name one with --draft" in err and err.count("\n") == 1


def test_every_field_of_the_trainer_is_an_option() -> None:
    from foretell.train.judge import TrainJudge

    options = {f.name: f.default for f in dataclasses.fields(judge.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainJudge)}
