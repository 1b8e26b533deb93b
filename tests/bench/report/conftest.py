"""A small document of a bench, measured once."""

from __future__ import annotations

from typing import Any

import pytest

from foretell import bench
from foretell.bench import Settings
from tests import tiny


@pytest.fixture(scope="package")
def document() -> dict[str, Any]:
    settings = Settings(
        models=("tiny",),
        methods=("ngram:n=2,k=4,nodes=3", "draft:nodes=3", "rest", "superposed"),
        max_new_tokens=16,
        rounds=1,
    )
    sets = {
        "code": ["def add(a, b):\n    return a + b\n\ndef sub(a, b):"] * 4,
        "prose": ["The fox, and the fox"] * 4,
    }
    found = bench.begin_document(settings, sets)
    found["bandwidth"] = {"bytes_per_s": 2e10, "device": "cpu"}
    return bench.run_bench(settings, sets, lambda model, dtype: tiny.lm(), found)
