"""The document of a comparison: written, read, merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from comparison import document

from foretell.errors import BadFile
from tests.scripts.comparison.documents import document as made
from tests.scripts.comparison.documents import part


def test_what_is_written_is_read_again_and_has_a_run_a_line(tmp_path: Path) -> None:
    whole = made()
    text = document.text(whole)
    assert '    ["foretell bfloat16 plain", 0, 1, 30.0, 1.0, 0.1, "same"],\n' in text
    (tmp_path / "a.json").write_text(text)
    assert document.read(tmp_path / "a.json") == whole


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": "foretell.compare/1"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BadFile, match=r"a\.json: is no document"):
        document.read(tmp_path / "a.json")
    with pytest.raises(BadFile, match="is no document"):
        document.read(tmp_path / "missing.json")
    empty = made() | {"parts": []}
    (tmp_path / "a.json").write_text(json.dumps(empty))
    with pytest.raises(BadFile, match="is no document"):
        document.read(tmp_path / "a.json")


def test_parts_are_merged_where_their_settings_agree() -> None:
    one = made(part(sets=("chat",)))
    other = made(part(sets=("code",)))
    merged = document.merge([one, other], ["a", "b"])
    assert merged["parts"] == one["parts"] + other["parts"]
    assert len(one["parts"]) == 1, "what is merged stays as it was"
    with pytest.raises(BadFile, match=r"b: .* another rounds \(5 there, 2 in a\)"):
        document.merge([one, made(rounds=5)], ["a", "b"])
