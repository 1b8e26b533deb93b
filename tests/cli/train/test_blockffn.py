"""`foretell train blockffn`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = (
    "layers=1 hidden=16 heads=2 kv-heads=1 blocks=4 width=4 vocab-size=300 context=32 chunk=16 "
    "batch=64 micro=64 tokens=128 warmup=1 windows=2"
)


def test_training_is_a_command(run: Any, tmp_path: Path) -> None:
    text = tmp_path / "t.jsonl"
    rows = [{"path": f"f{i}", "text": f"The dog {i} sat on the mat. " * 30} for i in range(300)]
    text.write_text("\n".join(json.dumps(row) for row in rows))
    args = ["train", "blockffn", "--out", str(tmp_path / "run"), "--text", str(text)]
    args += ["--corpus", str(tmp_path / "corpus")]
    for setting in SIZES.split():
        name, value = setting.split("=")
        args += [f"--{name}", value]
    code, out, _ = run(*args)
    assert code == 0 and "128 tokens seen" in out and "successive tokens" in out
    code, out, _ = run(*args, "--json")
    assert code == 0 and json.loads(out)["heldout"]["perplexity"] > 1
    code, _, _ = run(
        "generate", "The", "--model", str(tmp_path / "run" / "model"), "--max-new-tokens", "3"
    )
    assert code == 0
    code, _, said = run(*args, "--chunk-weight", "-1")
    assert code == 2 and "chunk_weight=-1" in said and said.count("\n") == 1
