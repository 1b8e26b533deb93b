"""`foretell train dpo` and `foretell train mango`."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import dpo, mango
from tests.train.preferences.test_mango import code as commented
from tests.train.preferences.test_preferences import written

SIZE = ["--rank", "2", "--length", "120", "--batch", "4", "--micro", "4", "--epochs", "1"]


def test_pairs_make_another_model(run: Any, folder: str, tmp_path: Path) -> None:
    path, out = str(written(tmp_path)), str(tmp_path / "run")
    args = ["train", "dpo", "--target", folder, "--pairs", path, "--out", out, *SIZE]
    code, said, err = run(*args)
    assert code == 0 and said.count("\n") == 1, err
    assert f"{out}: learnt from 10 pairs; of 2 others the better answer" in said
    assert "10 pairs, 3 steps over" in err
    assert {path.name for path in Path(out).iterdir()} >= {"lora", "model", "report.json"}
    assert "beta = 0.1" in (tmp_path / "run" / "recipe.toml").read_text()
    code, said, _ = run("generate", "Who", "--model", f"{out}/model", "--max-new-tokens", "2")
    assert code == 0 and said
    rows = ["--rows", f"lol:amateur={out}/lora", "--max-new-tokens", "2"]
    assert run("generate", "Who", "--model", folder, *rows)[0] == 0


def test_commented_code_makes_another_model(run: Any, folder: str, tmp_path: Path) -> None:
    path, out = commented(tmp_path), str(tmp_path / "run")
    args = ["train", "mango", "--target", folder, "--code", path, "--out", out, *SIZE]
    code, said, err = run(*args, "--merged", "")
    assert code == 0 and said.count("\n") == 1, err
    assert "learnt from 8 answers; a token of 2 others" in said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["recipe"]["code"] == [path] and report["steps"] == 2
    # The run's own recipe repeats it.
    again = ["--recipe", f"{out}/recipe.toml", "--out", str(tmp_path / "again")]
    assert run("train", "mango", *again)[0] == 0
    weights = "lora/adapter_model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == Path(out, weights).read_bytes()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["dpo", "--pairs", "gone.jsonl"], "gone.jsonl: cannot be read"),
        (["dpo", "--pairs", "{}/bad.jsonl"], "bad.jsonl, row 1: `chosen` must be a text"),
        (["dpo", "--pairs", "{}/pairs.jsonl", "--merged", "int8"], "merged='int8': must be one"),
        (["dpo", "--pairs", "{}/pairs.jsonl", "--beta", "-1"], "beta=-1.0: must be between"),
        (["mango", "--code", "{}/gone"], "gone: no such file or folder"),
        (["mango", "--code", "{}"], "0 pairs of answers of at most 128 tokens"),
        (["mango", "--code", "{}", "--layers", ""], "layers=''"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, folder: str, tmp_path: Path
) -> None:
    written(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Hi"}\n')
    name, *rest = [arg.format(tmp_path) for arg in args]
    out = ["--target", folder, "--out", str(tmp_path / "run")]
    code, said, err = run("train", name, *out, *rest)
    assert code == 2 and not said and words in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "command"), [("dpo", dpo), ("mango", mango)])
def test_every_field_of_the_trainer_is_an_option(name: str, command: Any) -> None:
    trainer = getattr(import_module(f"foretell.train.{name}"), f"Train{name.title()}")
    options = {field.name: field.default for field in dataclasses.fields(command.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(trainer)}
