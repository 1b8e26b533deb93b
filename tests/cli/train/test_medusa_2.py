"""`foretell train medusa-2`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import medusa_2

SIZE = ["--tokens", "128", "--batch", "128", "--micro", "128", "--window", "128", "--common", "64"]


def test_from_prompts_to_a_tuned_target_is_one_command(
    run: Any, folder: str, prompts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="needs foretell[lora]")
    args = ["train", "medusa-2", "--target", folder, "--out", str(tmp_path / "run")]
    args += ["--answers", str(tmp_path / "answers"), "--prompts", str(prompts)]
    code, out, err = run(*args, "--answer-tokens", "16", "--dtype", "float32", *SIZE)
    assert code == 0 and "128 tokens seen; perplexity" in out and out.count("\n") == 1, err
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"lora", "head", "model"}
    assert "tokens = 128" in (tmp_path / "run" / "recipe.toml").read_text()
    method = f"medusa:head={tmp_path / 'run' / 'head'},nodes=4"
    model = ["--model", str(tmp_path / "run" / "model"), "--method", method]
    code, out, _ = run("generate", "def", *model, "--max-new-tokens", "6", "--json")
    assert code == 0 and json.loads(out)["stats"]["calls"]["head"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing to answer"),
        (["--own", "1", "--merged", "int8"], "merged='int8': must be one of"),
        (["--own", "1", "--schedule", "never"], "schedule='never': must be one of sine"),
        (["--own", "1", "--init", "gone"], "gone/config.json"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="needs foretell[lora]")
    places = ["--out", str(tmp_path / "run"), "--answers", str(tmp_path / "answers")]
    code, out, err = run("train", "medusa-2", "--target", "demo", *places, *args)
    assert code == 2 and not out
    assert words in err.splitlines()[-1]


def test_without_its_package_the_cure_is_told(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.train.heads.medusa_2.find_spec", lambda name: None)
    places = ["--out", str(tmp_path / "run"), "--answers", str(tmp_path / "answers")]
    code, out, err = run("train", "medusa-2", "--target", "demo", *places, "--own", "1")
    assert code == 2 and not out and "pip install 'foretell[lora]'" in err


def test_every_field_of_the_trainer_is_an_option() -> None:
    from foretell.train.heads.medusa_2 import TrainMedusa2

    options = {field.name: field.default for field in dataclasses.fields(medusa_2.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainMedusa2)}
