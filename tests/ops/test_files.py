"""Files that are written whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from foretell.errors import BadFile
from foretell.ops.files import replace_file, write_text
from tests.files import full_disk


def test_a_text_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "text"
    write_text(path, "a naïve text\n")
    assert path.read_text("utf-8") == "a naïve text\n"
    write_text(path, "another")
    assert path.read_text("utf-8") == "another"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_safetensors_can_be_read_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    (tmp_path / "other").touch()
    with replace_file(path) as part:
        save_file({"a": np.arange(3)}, part)
    assert load_file(path)["a"].tolist() == [0, 1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_on_a_full_disk_the_old_file_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("old")
    with full_disk(100), pytest.raises(BadFile) as raised:
        write_text(path, "x" * 1000, "free some space")
    assert str(raised.value) == f"{path}: cannot be written (File too large); free some space"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_safetensors_has_an_error_of_its_own_for_that(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    with (
        full_disk(100),
        pytest.raises(BadFile, match=r"cannot be written \(File too large"),
        replace_file(path) as part,
    ):
        save_file({"a": np.zeros(1_000_000)}, part)
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replace_file(path) as part:
        part.write_text("new")
        1 / 0  # noqa: B018
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["folder", "file/text", "file/folder/text"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(BadFile) as raised, replace_file(path):
        pytest.fail("the work was begun")
    assert str(raised.value).startswith(f"{path}: cannot be written (")
    assert "\n" not in str(raised.value)
