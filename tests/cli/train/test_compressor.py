"""`foretell train compressor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny


@pytest.mark.parametrize("kind", ["arc-encoder", "lclm"])
def test_what_it_trains_can_be_used(run: Any, tmp_path: Path, kind: str) -> None:
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": f"{text} {number} {text}" * 3} for number in range(8) for text in tiny.TEXTS]
    texts.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "doc.txt").write_text(tiny.TEXTS[1])
    out = tmp_path / "run"
    sizes = "--layers 1 --length 16 --following 16 --texts 8 --batch 4 --held 2"
    given = ["train", "compressor", "--target", str(folder), "--kind", kind, *sizes.split()]
    given += ["--text", str(texts), "--out", str(out)]
    code, said, err = run(*given, "--json")
    assert code == 0, err
    assert {*json.loads(said)["bits_per_byte"]} == {"full", "none", "raw", "compressed", "another"}
    code, said, _ = run(*given)
    assert code == 0 and f"--kv {kind}:folder={out / 'compressor'}" in said
    asked = ["generate", "--model", str(folder), "--executor", "torch", "--max-new-tokens", "4"]
    asked += ["--context", str(tmp_path / "doc.txt"), "--kv", f"{kind}:folder={out / 'compressor'}"]
    code, _, err = run(*asked, "The dog")
    assert code == 0, err
    code, _, err = run(*given, "--kind", "zip")
    assert code == 2 and "kind='zip'" in err
