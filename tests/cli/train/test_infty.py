"""`foretell train infty`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from foretell.cli.train import infty


def test_rounds_are_counted(run: Any, folder: str, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.jsonl", tmp_path / "rounds.jsonl"
    texts.write_text('{"prompt": "Hi", "answer": "<think>\\nOne.\\n</think> Two."}\n')
    args = ["train", "infty", "--model", folder, "--texts", str(texts), "--out", str(out)]
    code, said, _ = run(*args)
    assert code == 0 and f"{out}: 1 rounds of 1 texts, 0 left out" in said
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row == {"prompt": "Hi", "history": "", "target": "<think>\nOne.\n</think> Two."}
    assert json.loads(run(*args, "--json")[1])["rows"] == 1
    code, said, err = run(*args, "--tries", "0")
    assert code == 2 and not said and "tries=0" in err.splitlines()[-1]


def test_every_field_of_the_cut_is_an_option() -> None:
    from foretell.train.preferences.infty import Cut

    options = {field.name: field.default for field in dataclasses.fields(infty.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(Cut)}
