"""`foretell train draft`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import draft

SIZE = {
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 16,
    "context": 128,
    "window": 128,
    "batch": 128,
    "micro": 128,
    "common": 32,
    "sampled": 32,
    "tokens": 256,
    "warmup": 1,
}


def test_distilling_is_a_command(run: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def add_{i}(a, b):"}) for i in range(3)]
    prompts.write_text("\n".join(lines))
    options = [
        x for name, value in SIZE.items() for x in (f"--{name.replace('_', '-')}", str(value))
    ]
    args = ["train", "draft", "--target", "demo", "--out", str(tmp_path / "run")]
    args += ["--answers", str(tmp_path / "answers"), "--prompts", str(prompts)]
    plain = tmp_path / "plain.txt"
    plain.write_text("The quick brown fox jumps over the lazy dog again and again. " * 400)
    args += ["--answer-tokens", "12", "--text", str(plain), "--text-tokens", "512", *options]
    code, out, _ = run(*args)
    assert code == 0 and "256 tokens seen" in out and out.count("\n") == 1
    assert json.loads((tmp_path / "run" / "text" / "report.json").read_text())["tokens_seen"] == 512
    model = str(tmp_path / "run" / "model")
    code, out, _ = run(
        "generate", "def", "--draft", model, "--method", "draft", "--max-new-tokens", "4", "--json"
    )
    assert code == 0 and len(json.loads(out)["tokens"]) <= 4


def test_a_model_with_exits_gets_thresholds_for_its_target(run: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def add_{i}(a, b):"}) for i in range(3)))
    sizes = {**SIZE, "layers": 2, "exits": 1}
    options = [
        x for name, value in sizes.items() for x in (f"--{name.replace('_', '-')}", str(value))
    ]
    args = ["train", "draft", "--target", "demo", "--out", str(tmp_path / "run"), *options]
    args += ["--answers", str(tmp_path / "answers"), "--prompts", str(prompts)]
    code, _, _ = run(*args, "--answer-tokens", "12")
    assert code == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    (table,) = config["foretell_exits"]["targets"]
    assert table["name"] == "demo" and table["format"] == "int8"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing to answer"),
        (["--own", "1", "--exits", "9"], "exits="),
        (["--own", "1", "--answer-tokens", "0"], "'--answer-tokens': Input should be greater"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--own", "1", "--hidden", "100"], "hidden=100"),
        (["--own", "1", "--text-tokens", "0"], "'--text-tokens': Input should be greater"),
        (["--own", "2"], "chat template"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, tmp_path: Path
) -> None:
    places = ["--out", str(tmp_path / "run"), "--answers", str(tmp_path / "answers")]
    code, out, err = run("train", "draft", "--target", "demo", *places, *args)
    assert code == 2 and not out
    assert words in err and err.count("\n") == 1


def test_every_field_of_the_trainer_is_an_option() -> None:
    from foretell.train.draft import TrainDraft

    options = {field.name: field.default for field in dataclasses.fields(draft.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainDraft)}
