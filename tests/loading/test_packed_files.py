"""Files of packed weights: read as they were written, or not at all, within a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from foretell.errors import BadConfig, BadFile
from foretell.loading import packed_files
from foretell.loading.packed_files import MAGIC, VARIABLE, packed_folder, read, write

MODEL = {"what": ["it", 1]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return packed_folder()


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "bytes": torch.randint(0, 256, (5000,), generator=generator, dtype=torch.uint8),
        "halves": torch.randn(3, 7, generator=generator).half(),
        "none": torch.empty(0, dtype=torch.bfloat16),
        "one": torch.tensor(2.5, dtype=torch.bfloat16),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "ids": torch.arange(9),
    }


def test_what_is_written_is_read_again(folder: Path) -> None:
    assert read("a.packed") is None
    write("a.packed", MODEL, tensors())
    found = read("a.packed")
    assert found is not None and found.model == MODEL and [*found.tensors] == [*tensors()]
    for name, tensor in tensors().items():
        ours = found.tensors[name]
        assert ours.dtype is tensor.dtype and torch.equal(ours, tensor), name
        assert ours.data_ptr() % 64 == 0 or not ours.numel(), name
    assert [path.name for path in folder.iterdir()] == ["a.packed"]


def test_what_is_changed_stays_in_the_process() -> None:
    write("a.packed", MODEL, tensors())
    found = read("a.packed")
    assert found is not None
    found.tensors["ids"].zero_()
    again = read("a.packed")
    assert again is not None and torch.equal(again.tensors["ids"], torch.arange(9))


def test_a_file_that_is_replaced_or_removed_goes_on_being_read(folder: Path) -> None:
    write("a.packed", MODEL, tensors())
    first = read("a.packed")
    write("a.packed", MODEL, {"ids": torch.ones(3)})
    second = read("a.packed")
    assert packed_files.clean() > 0 and not [*folder.iterdir()]
    assert first is not None and second is not None and read("a.packed") is None
    assert torch.equal(first.tensors["ids"], torch.arange(9))
    assert torch.equal(second.tensors["ids"], torch.ones(3))


@pytest.mark.parametrize("place", [0, 9, 20, 60, 300])
def test_a_wrong_byte_of_the_header_is_found(folder: Path, place: int) -> None:
    write("a.packed", MODEL, tensors())
    contents = bytearray((folder / "a.packed").read_bytes())
    contents[place] ^= 1
    (folder / "a.packed").write_bytes(contents)
    with pytest.raises(BadFile, match=r"a\.packed: damaged \("):
        read("a.packed")


def test_wrong_numbers_are_found_where_tensors_begin_and_end(folder: Path) -> None:
    write("a.packed", MODEL, tensors())
    contents = bytearray((folder / "a.packed").read_bytes())
    start = contents.rindex(tensors()["bytes"].numpy().tobytes())
    contents[start + 4999] ^= 1
    (folder / "a.packed").write_bytes(contents)
    with pytest.raises(BadFile, match="numbers are not what was written"):
        read("a.packed")


@pytest.mark.parametrize("size", [0, 7, 40, 100, 4096, -1])
def test_a_file_that_is_cut_off_is_found(folder: Path, size: int) -> None:
    write("a.packed", MODEL, tensors())
    os.truncate(
        folder / "a.packed", size if size >= 0 else os.path.getsize(folder / "a.packed") - 1
    )
    with pytest.raises(BadFile, match=r"a\.packed: damaged \("):
        read("a.packed")


def test_a_file_of_another_name_or_kind_is_found(folder: Path) -> None:
    write("a.packed", MODEL, tensors())
    (folder / "a.packed").rename(folder / "b.packed")
    with pytest.raises(BadFile, match=r"b\.packed: damaged \("):
        read("b.packed")
    (folder / "c.packed").write_bytes(MAGIC + b"\xff" * 4000)
    with pytest.raises(BadFile, match="cut off"):
        read("c.packed")


def test_the_least_recently_used_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        write(name, MODEL, {"ids": torch.zeros(100_000)})
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    assert read("old") is not None  # and so it is the one that was used last
    size = packed_files.held_bytes() // 3
    monkeypatch.setenv(VARIABLE, str(3.5 * size / 1e9))
    write("one more", MODEL, {"ids": torch.zeros(100_000)})
    assert {path.name for path in folder.iterdir()} == {"new", "old", "one more"}
    monkeypatch.setenv(VARIABLE, str(0.5 * size / 1e9))
    with pytest.raises(BadFile, match=r"more than the limit.*FORETELL_PACKED_GB names another"):
        write("too large", MODEL, {"ids": torch.zeros(100_000)})
    assert len([*folder.iterdir()]) == 3


@pytest.mark.parametrize("stated", ["many", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, stated)
    with pytest.raises(BadConfig, match=VARIABLE):
        packed_files.most_bytes()


def test_the_usual_limit_leaves_most_of_the_disk_free(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 40})
    monkeypatch.setattr(packed_files.shutil, "disk_usage", lambda path: usage)
    assert packed_files.most_bytes() == 10
    usage.free = 10**15
    assert packed_files.most_bytes() == packed_files.MOST_BYTES


def test_all_are_removed_at_once(folder: Path) -> None:
    assert packed_files.clean() == 0
    write("a.packed", MODEL, tensors())
    write("b.packed", MODEL, tensors())
    size = packed_files.held_bytes()
    assert packed_files.clean() == size > 10_000 and not [*folder.iterdir()]


def test_a_digest_notices_what_changes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1_000_000))
    kept = path.stat()

    def digest(*details: str) -> str:
        return packed_files.source_digest({path: 1000}, *details)

    first = digest("int8")
    assert digest("int8") == first != digest("int4")
    for place in (0, 999, 500_000, 999_999):  # one between samples is seen by the times alone
        contents = bytearray(1_000_000)
        contents[place] = 1
        path.write_bytes(contents)
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        assert digest("int8") != first, place
    path.write_bytes(bytes(1_000_001))
    assert digest("int8") != first
