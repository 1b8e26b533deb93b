"""`foretell train gates`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import tiny


def test_gates_of_texts_can_be_used(run: Any, tmp_path: Path) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "g.safetensors"
    text.write_text(" ".join(tiny.TEXTS) * 30)
    folder = tiny.save(tiny.llama(max_position_embeddings=512), tmp_path / "model")
    model = ["--model", str(folder), "--executor", "torch"]
    sizes = "--steps 2 --texts 1 --keys 1 --words 2 --shortest 260 --longest 260 --sinks 4"
    given = ["train", "gates", *model, "--text", str(text), "--out", str(out), *sizes.split()]
    code, said, _ = run(*given, "--recent", "20", "--json")
    assert code == 0 and json.loads(said)["steps"] == 2 and out.is_file()
    code, said, _ = run(*given, "--recent", "20")
    assert code == 0 and f"duo-attention:gates={out}" in said
    for name in ("duo-attention", "lserve"):
        code, _, said = run("generate", "d", *model, "--kv", f"{name}:gates={out}")
        assert code == 0, said
    code, _, said = run(*given, "--recent", "300")
    assert code == 2 and "shortest=260" in said
