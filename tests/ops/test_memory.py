"""Pages leave the memory, and nothing but pages of private mapped files; sizes are few and
close.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.ops import memory
from foretell.ops.memory import LARGE_PAGE, SIZES, large_pages, release_pages, round_row_count

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told to let pages go")


def resident(path: Path) -> int:
    """Bytes of the file that this process has in memory."""
    total, mine = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            mine = str(path) in line
        elif mine and first == "Rss:":
            total += 1024 * int(rest[0])
    return total


def mapped(path: Path, mode: str) -> torch.Tensor:
    """A million numbers of a file of 4 MB, all read once."""
    np.arange(1 << 20, dtype=np.int32).tofile(path)
    tensor = torch.from_numpy(np.memmap(path, np.int32, mode))  # type: ignore[call-overload]
    assert int(tensor.max()) == (1 << 20) - 1
    return tensor


@linux
def test_pages_of_a_mapped_file_leave_and_come_back_when_they_are_read(tmp_path: Path) -> None:
    tensor = mapped(tmp_path / "weights", "c")
    before = resident(tmp_path / "weights")
    part = tensor[1000:-1000]
    assert before == 1 << 22 and part.nbytes - 8192 < release_pages([part]) <= part.nbytes
    assert resident(tmp_path / "weights") <= before - part.nbytes + 8192
    assert torch.equal(tensor, torch.arange(1 << 20, dtype=torch.int32))


@linux
def test_other_memory_is_left_alone(tmp_path: Path) -> None:
    shared = mapped(tmp_path / "weights", "r+")
    shared[:] = 7
    own, odd = (
        torch.full((1 << 20,), 7, dtype=torch.int32),
        mapped(tmp_path / "odd", "c").view(1 << 10, -1).t(),
    )
    assert (
        release_pages([own, shared, odd, own[:3], own[:0], torch.empty(1 << 20, device="meta")])
        == 0
    )
    assert bool((own == 7).all()) and bool((shared == 7).all())


def test_elsewhere_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = mapped(tmp_path / "weights", "c")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert release_pages([tensor]) == 0


@linux
@pytest.mark.parametrize("size", [1, LARGE_PAGE, 3 * LARGE_PAGE + 5])
def test_large_pages_begin_where_pages_do_and_are_memory_like_any_other(size: int) -> None:
    pages = large_pages(size)
    assert pages is not None and pages.shape == (size,) and pages.data_ptr() % LARGE_PAGE == 0
    part = pages[size // 2 :]
    pages.fill_(7)
    del pages
    assert int(part.sum()) == 7 * len(part), "it lives as long as a part of it is in use"


@linux
def test_no_large_pages_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert large_pages(1) is None


def test_sizes_are_few_and_close() -> None:
    sizes = [round_row_count(n) for n in range(1, 2000)]
    assert (
        sizes == sorted(sizes)
        and {*sizes} >= {*SIZES}
        and [round_row_count(n) for n in sizes] == sizes
    )
    assert all(n <= size <= n + max(n / 3 + 1, 256 * (n > 512)) for n, size in enumerate(sizes, 1))
    assert len({*sizes[:512]}) == len(SIZES) < 30


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n"}, 1_024_000),
        (
            {
                "proc/meminfo": "MemAvailable: 1000 kB\n",
                "sys/fs/cgroup/memory.max": "900000\n",
                "sys/fs/cgroup/memory.current": "200000\n",
            },
            700_000,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 1000 kB\n",
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "200000\n",
            },
            1_024_000,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "100",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "200",
            },
            0,
        ),
        ({"proc/meminfo": "MemAvailable: some\n"}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\n"}, None),
    ],
    ids=[
        "nothing",
        "a machine",
        "a container",
        "no limit",
        "an older container",
        "damaged",
        "another",
    ],
)
def test_memory_to_spare_is_the_machines_or_the_containers(
    files: dict[str, str], left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SYSTEM", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.spare_bytes(torch.device("cpu")) == left
