"""docs/scaling.md: its numbers are what the functions give, and its proposer drafts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretell.drafters.lookup.datastore import build_datastore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
SUMS = [block for block in BLOCKS if "foretell.cluster.plan" in block]


def test_every_number_of_the_page_is_right() -> None:
    checked = 0
    for block in SUMS:
        names: dict[str, Any] = {}
        exec(block, names)
        for line in block.splitlines():
            expression, sign, value = line.partition("  # = ")
            if sign:
                got, said = eval(expression, names), eval(value, names)
                assert got == pytest.approx(said) if isinstance(said, float) else got == said, line
                checked += 1
    assert len(SUMS) == 6 and checked == 22


def test_the_proposer_continues_what_the_datastore_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    documents = [[1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 5, 7], [8, 2, 3, 4, 1, 1]]
    build_datastore(Path("texts.safetensors"), documents)
    (source,) = [block for block in BLOCKS if "class FromDatastore" in block]
    names: dict[str, Any] = {}
    exec(source, names)
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    proposer = names["FromDatastore"](config)
    rows = np.array([[0, 2, 3, 0], [5, 5, 5, 5], [1, 2, 3, 4]])
    drafts = proposer.propose([[3], [5], []], np.array([3, 4, 4]), rows)
    assert drafts == [[4, 5], [], []]
