"""`foretell train attribute`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    lines = [json.dumps({"prompt": f"def f{i}(a, b):\n    return {i}"}) for i in range(20)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "p.jsonl")


def test_a_classifier_is_trained_and_used(
    run: Any, folder: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretell.train import attribute as trainer
    from foretell.train import judge

    monkeypatch.setattr(judge, "STRENGTHS", (0.01,))  # one try, for time
    out = tmp_path / "a.safetensors"
    given = ["--model", folder, "--prompts", prompts, "--out", str(out), "--grams", "1"]
    given += ["--answer-tokens", "8", "--beams", "2", "--samples", "2"]
    code, text, err = run("train", "attribute", *given, "--json")
    assert code == 0, err
    report = json.loads(text)
    assert report["prompts"] == 20 and 0 < report["good"] < 1
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "train", lambda *_: report)
        code, text, _ = run("train", "attribute", *given)
    assert code == 0 and text.count("\n") == 1 and "--method conditional-beam:attribute=" in text
    method = f"conditional-beam:attribute={out},least=0,grams=0,width=2"
    code, text, err = run(
        "generate", "def", "--model", folder, "--method", method, "--max-new-tokens", "6", "--json"
    )
    assert code == 0 and json.loads(text)["tokens"], err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--grams", "0", "--least", "0"], "there is nothing to learn"),
        (["--pattern", "("], "pattern='(': must be a regular expression"),
        (["--prompts", "./none"], "none: cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    run: Any, folder: str, prompts: str, tmp_path: Path, args: list[str], said: str
) -> None:
    given = ["--model", folder, "--prompts", prompts, "--out", str(tmp_path / "a.safetensors")]
    code, out, err = run("train", "attribute", *given, *args)
    assert code == 2 and not out and said in err and err.count("\n") == 1
