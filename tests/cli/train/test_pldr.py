"""`foretell train pldr`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = (
    "layers=1 heads=2 width=8 units=1 inner=8 vocab-size=300 context=32 batch=64 micro=64 "
    "tokens=128 warmup=1 windows=2"
)


def test_training_is_a_command(run: Any, tmp_path: Path) -> None:
    text = tmp_path / "t.jsonl"
    rows = [{"path": f"f{i}", "text": f"The dog {i} sat on the mat. " * 30} for i in range(300)]
    text.write_text("\n".join(json.dumps(row) for row in rows))
    args = ["train", "pldr", "--out", str(tmp_path / "run"), "--corpus", str(tmp_path / "corpus")]
    args += ["--text", str(text)]
    for setting in SIZES.split():
        name, value = setting.split("=")
        args += [f"--{name}", value]
    code, out, _ = run(*args)
    assert code == 0 and "128 tokens seen" in out and "frozen" in out and out.count("\n") == 2
    code, out, _ = run(*args, "--json")
    assert code == 0 and json.loads(out)["metric"]["loss"]["cached"] > 0
    for model in ("model", "frozen"):
        where = ["--model", str(tmp_path / "run" / model), "--executor", "torch"]
        assert run("generate", "The", *where, "--max-new-tokens", "3")[0] == 0
    code, _, said = run(*args, "--metric", "other")
    assert code == 2 and "metric='other'" in said and said.count("\n") == 1
