"""`foretell train filter`, from a folder of a denoiser to its use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny


@pytest.fixture
def denoiser(tmp_path: Path) -> str:
    """A folder whose model fills canvases."""
    folder = tiny.save(tiny.llama(), tmp_path / "denoiser")
    path = folder / "config.json"
    about = json.loads(path.read_text())
    about["canvas"] = {"mask_id": 321, "shift": 0, "block": 0}
    path.write_text(json.dumps(about))
    return str(folder)


def test_a_filter_of_prompts_can_be_used(run: Any, denoiser: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "f.safetensors"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("def", "The", "a b", "x")))
    model = ["--model", denoiser, "--executor", "torch"]
    given = ["train", "filter", *model, "--prompts", str(prompts), "--out", str(out)]
    given += ["--block", "4", "--length", "12", "--epochs", "20"]
    code, said, _ = run(*given, "--json")
    assert code == 0 and json.loads(said)["examples"] >= 10 and out.is_file()
    code, said, _ = run(*given)
    assert code == 0 and f"learn2pd:filter={out}" in said
    method = f"learn2pd:block=4,filter={out}"
    code, _, _ = run("generate", "def", *model, "--method", method, "--max-new-tokens", "8")
    assert code == 0
    code, _, said = run("generate", "def", *model, "--method", "suffix")
    assert code == 2 and "fills canvases" in said


def test_prompts_that_are_not_there_are_named(run: Any, denoiser: str, tmp_path: Path) -> None:
    given = ["--model", denoiser, "--prompts", "./none", "--out", str(tmp_path / "f")]
    code, _, said = run("train", "filter", *given)
    assert code == 2 and "./none" in said
