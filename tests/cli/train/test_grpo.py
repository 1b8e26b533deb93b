"""`foretell train grpo`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import grpo
from tests.train.preferences.test_rollouts import written

SIZE = ["--rounds", "1", "--per-round", "2", "--group", "2", "--answer-tokens", "4"]
SIZE += ["--dtype", "float32", "--executor", "torch", "--merged", "float32"]


def prompts(folder: Path, **more: Any) -> list[str]:
    rows = [{"prompt": f"Is {n} odd?", **more} for n in range(6)]
    return ["--prompts", str(written(folder / "prompts.jsonl", *rows))]


def test_from_prompts_to_another_model_is_one_command(
    run: Any, folder: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    args = ["train", "grpo", "--target", folder, *prompts(tmp_path, references="yes it is"), *SIZE]
    args += ["--out", str(out), "--drafter", "ngram", "--hardest", "0.5"]
    code, said, err = run(*args)
    assert code == 0 and said.count("\n") == 1 and "1 rounds; answers to 1 prompts" in said, err
    assert "5 prompts to learn from and 1 to measure by; at most 36 tokens" in err
    assert {path.name for path in out.iterdir()} >= {"lora", "model", "rounds.jsonl", "report.json"}
    assert json.loads((out / "report.json").read_text())["prompts"] == 2
    code, again, _ = run("train", "grpo", "--recipe", str(out / "recipe.toml"))
    assert code == 0 and again == said
    code, text, _ = run(
        "generate", "--model", str(out / "model"), "--max-new-tokens", "4", "Is it?"
    )
    assert code == 0 and text
    with_lora = ["--rows", f"lol:amateur={out / 'lora'}", "--max-new-tokens", "4"]
    code, text, _ = run("generate", "--model", folder, *with_lora, "Is it?")
    assert code == 0 and text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--answer-tokens", "512"], "answer_tokens=512: must be less than the 128 tokens"),
        (["--group", "1"], "group=1: must be between 2"),
        (["--reward", "keywords"], "row 1: keywords"),
        (["--hardest", "0.5"], "some prompts have none"),
        (["--t", "10"], "give calibrate"),
        (["--merged", "int8"], "merged='int8': must be one of"),
        (["--drafter", "sufix"], "sufix"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, folder: str, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "run"), "--answer-tokens", "4"]
    code, said, err = run("train", "grpo", "--target", folder, *prompts(tmp_path), *out, *args)
    assert code == 2 and not said
    assert words in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_every_field_of_the_trainer_is_an_option() -> None:
    from foretell.train.preferences.grpo import TrainGrpo

    options = {field.name: field.default for field in dataclasses.fields(grpo.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainGrpo)}
