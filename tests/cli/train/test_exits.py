"""`foretell train exits`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.drafters.model.exit_table import FIELD
from foretell.train import answers
from foretell.train.answers import Text
from tests import tiny


@pytest.fixture
def draft(tmp_path: Path) -> str:
    model = tiny.relative(tiny.llama())
    setattr(model.config, FIELD, {"layers": [1, 2]})
    return str(tiny.save(model, tmp_path / "draft"))


def test_thresholds_are_found_kept_and_used(
    run: Any, folder: str, draft: str, tmp_path: Path
) -> None:
    rows = np.zeros((8, 1), np.int32), np.zeros((8, 1), np.float16)
    (tmp_path / "answers").mkdir()
    text = Text(np.arange(1, 13, dtype=np.int32), 4, *rows)
    answers.save(tmp_path / "answers" / "0.safetensors", [text] * 40)
    args = ["train", "exits", "--model", folder, "--draft", draft]
    args += ["--answers", str(tmp_path / "answers"), "--executor", "torch"]
    code, out, _ = run(*args)
    assert code == 0 and "thresholds" in out and out.count("\n") == 1
    code, out, _ = run(*args, "--json", "--length", "2")
    found = json.loads(out)
    assert code == 0 and found["length"] == 2 and len(found["shares"]) == 2
    kept = json.loads((Path(draft) / "config.json").read_text())[FIELD]["targets"]
    assert [table["thresholds"] for table in kept] == [found["thresholds"]]
    args = ["generate", "def", "--model", folder, "--draft", draft, "--method", "s2d:nodes=4"]
    code, out, _ = run(*args, "--max-new-tokens", "4", "--json")
    assert code == 0 and len(json.loads(out)["tokens"]) <= 4


def test_what_is_wrong_is_said_in_a_line(run: Any, folder: str, draft: str, tmp_path: Path) -> None:
    for args, words in (
        (["--model", folder], "--draft FOLDER"),
        (["--model", folder, "--draft", draft], "there are none"),
        (["--model", folder, "--draft", draft, "--length", "0"], "--length=0"),
    ):
        code, out, err = run("train", "exits", "--answers", str(tmp_path / "none"), *args)
        assert code == 2 and not out and words in err and err.count("\n") == 1
