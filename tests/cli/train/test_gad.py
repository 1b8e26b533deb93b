"""`foretell train gad`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZE = {
    "hidden": 16,
    "encoder-layers": 1,
    "decoder-layers": 1,
    "heads": 2,
    "intermediate": 16,
    "vocab-size": 290,
    "k": 4,
    "steps": 2,
    "draft-steps": 2,
    "batch": 4,
    "measured": 2,
    "share": 0.3,
}


def test_training_a_drafter_of_blocks_is_a_command(run: Any, tmp_path: Path) -> None:
    names = ("cat", "dog", "bird", "fish", "horse", "mouse", "snake", "goat", "wolf", "bear")
    rows = [{"path": name, "text": f"The {name} sat on the mat."} for name in names]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ["train", "gad", "--out", str(tmp_path / "run"), "--device", "cpu"]
    args += ["--text", str(tmp_path / "t.jsonl")]
    args += [part for name, value in SIZE.items() for part in (f"--{name}", str(value))]
    code, out, _ = run(*args)
    assert code == 0 and "tokens a step" in out and "measured on 2 sentences" in out
    folder = tmp_path / "run"
    asked = ["--model", str(folder / "model"), "--draft", str(folder / "drafter"), "--json"]
    texts = []
    for method in ("plain", "gad:nodes=4", "gad:nodes=4,rule=relaxed"):
        code, out, _ = run(
            "generate", "The cat.", *asked, "--method", method, "--max-new-tokens", "5"
        )
        assert code == 0
        texts.append(json.loads(out)["tokens"])
    assert texts[0] == texts[1] and texts[2]
    code, _, err = run(*args, "--seed", "1")
    assert code == 2 and "holds a run with other settings" in err
