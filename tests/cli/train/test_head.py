"""`foretell train head`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import head

SIZE = ["--tokens", "256", "--batch", "128", "--micro", "128", "--window", "128", "--common", "64"]


def written(run: Any, folder: str, method: str) -> dict[str, Any]:
    """The numbers of a few tokens by a method."""
    args = ["--model", folder, "--method", method, "--max-new-tokens", "6", "--dtype", "float32"]
    code, out, _ = run("generate", "def", *args, "--json")
    assert code == 0
    stats: dict[str, Any] = json.loads(out)["stats"]
    return stats


def test_from_prompts_to_a_head_is_one_command(
    run: Any, folder: str, prompts: Path, tmp_path: Path
) -> None:
    args = ["train", "head", "--target", folder, "--out", str(tmp_path / "run")]
    args += ["--answers", str(tmp_path / "answers"), "--states", str(tmp_path / "states")]
    args += ["--prompts", str(prompts), "--answer-tokens", "16", "--depths", "2", *SIZE]
    code, out, err = run(*args, "--dtype", "float32", "--states-dtype", "float32")
    assert code == 0 and "256 tokens seen" in out and out.count("\n") == 1
    assert "48 tokens of answers" in err and "GB for their states" in err
    made = str(tmp_path / "run" / "head")
    told = json.loads((tmp_path / "run" / "head" / "config.json").read_text())
    assert told["kind"] == "eagle3" and len(told["hits"]) == 5
    assert written(run, folder, f"eagle3:head={made},nodes=4")["calls"]["head"] > 0


def test_rows_through_the_target_need_no_states(
    run: Any, folder: str, prompts: Path, tmp_path: Path
) -> None:
    args = ["train", "head", "--target", folder, "--kind", "ppd", "--out", str(tmp_path / "run")]
    args += ["--answers", str(tmp_path / "answers"), "--prompts", str(prompts)]
    args += ["--answer-tokens", "16", "--anchors", "4", *SIZE]
    code, out, err = run(*args, "--dtype", "float32", "--states-dtype", "float32")
    assert code == 0 and "ppd" in out and "256 tokens seen" in out
    assert "4 anchors each, about" in err
    assert 'kind = "ppd"' in (tmp_path / "run" / "recipe.toml").read_text()
    made = str(tmp_path / "run" / "head")
    assert written(run, folder, f"ppd:head={made},nodes=4")["drafted"] > 0


@pytest.mark.parametrize(
    ("kind", "args", "words"),
    [
        ("eagle3", [], "learns from hidden states: give a folder, --states"),
        ("ppd", ["--reference", "gone"], "ppd takes no --reference"),
        ("ppd", ["--entry", "2"], "ppd: has no option 'entry'"),
        ("hidden-transfer", ["--entry", "99"], "hidden-transfer:entry=99"),
        ("ppd", ["--anchors", "0"], "anchors=0"),
    ],
)
def test_what_rows_cannot_have_is_said_in_a_line(
    kind: str, args: list[str], words: str, run: Any, tmp_path: Path
) -> None:
    places = [x for name in ("out", "answers") for x in (f"--{name}", str(tmp_path / name))]
    given = ["--target", "demo", "--own", "1", "--kind", kind, *places, *args]
    code, out, err = run("train", "head", *given)
    assert code == 2 and not out and words in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing to answer"),
        (["--own", "1", "--answer-tokens", "0"], "'--answer-tokens': Input should be greater"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--own", "1", "--kind", "eagle9"], "kind='eagle9': must be one of"),
        (["--own", "1", "--reference", "gone"], "gone/config.json"),
        (["--own", "1", "--init", "gone"], "gone/config.json"),
        (["--own", "1", "--objective", "mse"], "objective='mse'"),
        (["--own", "2"], "chat template"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, tmp_path: Path
) -> None:
    places = [
        x for name in ("out", "answers", "states") for x in (f"--{name}", str(tmp_path / name))
    ]
    code, out, err = run("train", "head", "--target", "demo", *places, *args)
    assert code == 2 and not out
    assert words in err.splitlines()[-1] and "Traceback" not in err


def test_every_field_of_the_trainer_is_an_option() -> None:
    from foretell.train.heads.head import TrainHead

    options = {field.name: field.default for field in dataclasses.fields(head.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainHead)}
