"""`foretell train kv-heads`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import tiny

SMALL = ["--length", "32", "--window", "32", "--micro", "32", "--batch", "32", "--tokens", "64"]


def test_a_model_with_fewer_heads_is_written_and_used(
    run: Any, folder: str, tmp_path: Path
) -> None:
    text, out = tmp_path / "t.jsonl", tmp_path / "out"
    rows = [{"text": f"{number} {' '.join(tiny.TEXTS)}"} for number in range(20)]
    text.write_text("\n".join(json.dumps(row) for row in rows))
    given = ["train", "kv-heads", "--target", folder, "--text", str(text), "--out", str(out)]
    code, said, _ = run(*given, *SMALL, "--held", "200")
    assert code == 0 and "1 key heads in place of 2" in said and "tuned" in said
    code, said, _ = run(*given, *SMALL, "--held", "200", "--json")
    assert code == 0 and json.loads(said)["heads"] == {"before": 2, "after": 1}
    model = ["--model", str(out / "model"), "--executor", "torch"]
    code, _, _ = run("generate", "def", *model, "--max-new-tokens", "4")
    assert code == 0
    code, _, said = run(*given, "--merge", "3", *SMALL, "--held", "200")
    assert code == 2 and "merge=3" in said and said.count("\n") == 1
