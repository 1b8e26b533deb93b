"""`foretell train k-forcing`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import k_forcing

SIZE = ["--tokens", "256", "--batch", "128", "--window", "128", "--rate", "0.01"]
SIZE += ["--warmup", "1", "--k", "2"]


def test_from_prompts_to_a_tuned_target_is_one_command(
    run: Any, folder: str, prompts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="needs foretell[lora]")
    args = ["train", "k-forcing", "--target", folder, "--out", str(tmp_path / "run")]
    args += ["--answers", str(tmp_path / "answers"), "--prompts", str(prompts)]
    code, out, err = run(*args, "--answer-tokens", "16", "--dtype", "float32", *SIZE)
    assert code == 0 and "256 tokens seen; perplexity" in out and out.count("\n") == 1, err
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"head", "model"}
    assert "tokens = 256" in (tmp_path / "run" / "recipe.toml").read_text()
    method = f"k-forcing:head={tmp_path / 'run' / 'head'}"
    tail = ["--method", method, "--max-new-tokens", "6", "--json"]
    code, out, _ = run("generate", "def", "--model", str(tmp_path / "run" / "model"), *tail)
    assert code == 0 and json.loads(out)["stats"]["calls"]["target"] < 6
    code, out, err = run("generate", "def", "--model", folder, *tail)
    assert code == 2 and "weights other than those of" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing to answer"),
        (["--own", "1", "--merged", "int8"], "merged='int8': must be one of"),
        (["--own", "1", "--k", "3"], "k=3: must be 1, 2, 4, 8 or 16"),
        (["--own", "1", "--batch", "64"], "batch=64: must be at least window=640"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="needs foretell[lora]")
    places = ["--out", str(tmp_path / "run"), "--answers", str(tmp_path / "answers")]
    code, out, err = run("train", "k-forcing", "--target", "demo", *places, *args)
    assert code == 2 and not out
    assert words in err.splitlines()[-1]


def test_every_field_of_the_trainer_is_an_option() -> None:
    from foretell.train.heads.k_forcing import TrainKForcing

    options = {field.name: field.default for field in dataclasses.fields(k_forcing.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainKForcing)}
