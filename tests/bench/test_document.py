"""A document is continued only where it was begun the same way."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.document import begin_document, open_document, write_document
from foretell.errors import BadFile
from tests.bench.fakes import PROMPTS, SMALL
from tests.files import full_disk


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rounds": 5}, "another settings.rounds (2 there, 5 here)"),
        ({"methods": ("plain",)}, "another settings.methods"),
        ({"temperatures": (0.5,)}, "settings.temperatures"),
        ({"device": "cuda"}, "another settings.device (None there, cuda here)"),
    ],
)
def test_a_file_of_other_settings_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    sets = {"a": PROMPTS}
    path = tmp_path / "out.json"
    write_document(begin_document(SMALL, sets), path)
    other = dataclasses.replace(SMALL, **change)
    with pytest.raises(BadFile) as raised:
        begin_document(other, sets, path)
    assert said in str(raised.value)
    assert "name another file" in str(raised.value)
    assert begin_document(SMALL, sets, path)["cells"] == []


def test_other_prompts_machines_and_files_are_refused(tmp_path: Path) -> None:
    sets = {"a": PROMPTS}
    path = tmp_path / "out.json"
    document = begin_document(SMALL, sets)
    write_document(document, path)
    with pytest.raises(BadFile, match=r"settings\.sets"):
        begin_document(SMALL, {"a": ["other"]}, path)
    elsewhere = copy.deepcopy(document)
    elsewhere["machine"]["threads"] = 99
    write_document(elsewhere, path)
    with pytest.raises(BadFile, match=r"machine\.threads \(99 there"):
        begin_document(SMALL, sets, path)
    for text in ("{", "[]", '{"schema": "foretell.measure.audit/1", "cells": []}'):
        path.write_text(text)
        with pytest.raises(BadFile, match="no document of foretell bench"):
            begin_document(SMALL, sets, path)


def test_a_full_disk_is_one_error_and_leaves_the_last_document(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    document = begin_document(SMALL, {"a": PROMPTS})
    write_document(document, path)
    longer = document | {"cells": [{"reason": "x" * 10_000}]}
    with full_disk(5000), pytest.raises(BadFile, match=r"cannot be written \(File too large\)"):
        write_document(longer, path)
    assert open_document(path) == document
    assert list(tmp_path.iterdir()) == [path]
