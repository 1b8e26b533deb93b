"""`foretell train channels`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import tiny


def test_a_table_of_texts_can_be_used(run: Any, folder: str, tmp_path: Path) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "c.safetensors"
    text.write_text(" ".join(tiny.TEXTS) * 3)
    model = ["--model", folder, "--executor", "torch"]
    given = ["train", "channels", *model, "--text", str(text), "--out", str(out)]
    code, said, _ = run(*given, "--json")
    assert code == 0 and json.loads(said)["pieces"] >= 1 and out.is_file()
    code, said, _ = run(*given)
    assert code == 0 and f"double-sparsity:calibration={out}" in said
    kv = f"double-sparsity:budget=4,channels=2,calibration={out}"
    code, _, _ = run("generate", "def", *model, "--kv", kv, "--max-new-tokens", "8")
    assert code == 0


def test_a_text_that_is_not_there_is_named(run: Any, folder: str, tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    code, _, said = run("train", "channels", "--model", folder, "--text", "./none", "--out", out)
    assert code == 2 and "./none" in said
