"""`foretell bench --suite`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli._suites import suites
from foretell.measure.suites import search


def test_a_suite_prints_a_table_and_writes_its_document(
    run: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "verdicts", lambda program, tests, limits: [False] * len(tests))
    words = ["bench", "--suite", "search", "--model", folder, "--items", "2", "--seed", "3"]
    words += ["--max-new-tokens", "2", "--temperature", "0.5", "--threads", "1"]
    path = tmp_path / "out.json"
    code, out, err = run(*words, "--json", str(path))
    assert code == 0 and err == ""
    assert "2 tasks" in out and "pg-td solves more" in out and "best-of" in out
    document = json.loads(path.read_text("utf-8"))
    wanted = {"items": 2, "max_new_tokens": 2, "temperature": 0.5, "seed": 3}
    assert wanted.items() <= document["settings"].items() and len(document["tasks"]) == 2
    assert "search" in suites()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--suite", "serch"], "unknown suite 'serch'; did you mean search"),
        (["--suite", "search", "--rounds", "2"], "--rounds: is not for the suite 'search'"),
        (["--suite", "search", "--methods", "plain"], "--methods: is not for the suite"),
        (["--suite", "search", "--temperature", "1,2"], "--temperature 1,2: a suite takes one"),
        (["--suite", "search", "--dtype", "int8,int4"], "--dtype int8,int4: a suite is measured"),
        (["--suite", "search", "--items", "1"], "items=1: must be at least 2"),
        (["--items", "3"], "--items: is for --suite"),
    ],
)
def test_what_it_cannot_honour_is_refused(run: Any, more: list[str], said: str) -> None:
    code, _, err = run("bench", "--model", "none", *more)
    assert code == 2 and said in err and len(err.splitlines()) == 1
