"""Memory that weights no longer need, and sizes that keep what torch remembers of them few."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

DONTNEED = 4  # Linux: MADV_DONTNEED
LARGE_PAGE = 2 << 20  # bytes
SYSTEM = Path("/")
# A control group's limit and what it has taken, of both versions.
GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
# numbers of rows that forwards compute; each is at most a third above the one before
SIZES = (
    *(1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64),
    *(80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)


def round_row_count(n: int) -> int:
    """The number of rows to compute where `n` are wanted.

    For every number of rows in a product of 16-bit numbers oneDNN makes a kernel, which takes about
    as long as the product, and torch keeps up to a thousand of them, of 0.6 MB each: prompts of any
    length would fill that. The rows added cost a forward a few percent, 15 at most (dev/LOG.md).
    """
    return next((size for size in SIZES if size >= n), -(-n // 256) * 256)


def release_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Takes pages of a mapped file that hold these tensors, whose numbers nobody needs again, out
    of memory.

    Returns how many bytes; 0 where the system is not Linux, or the tensors lie elsewhere: other
    memory is left alone. A mapping stays as long as one tensor of its file is in use, and all its
    pages that were read stay with it.
    """
    if sys.platform != "linux":
        return 0
    page_ranges = []  # (begin, end) of pages that hold nothing else
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            range_start = tensor.data_ptr()
            page_start = -(-range_start // mmap.PAGESIZE) * mmap.PAGESIZE
            page_end = (range_start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if page_start < page_end:
                page_ranges.append((page_start, page_end))
    if not page_ranges:
        return 0
    released_bytes = 0
    libc = ctypes.CDLL(None)
    for range_start, range_end in private_file_mappings():
        for page_start, page_end in page_ranges:
            if range_start <= page_start and page_end <= range_end:
                range_size = page_end - page_start
                has_failed = libc.madvise(
                    ctypes.c_void_p(page_start), ctypes.c_size_t(range_size), DONTNEED
                )
                released_bytes += 0 if has_failed else range_size
    return released_bytes


def spare_bytes(device: torch.device) -> int | None:
    """Bytes of memory that this process may still take on a device; None where nothing tells.

    On a GPU what is free; else what the system could give, and no more than the limit of the
    control group that a container or a service runs in.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    byte_limits = []
    with contextlib.suppress(OSError, ValueError):
        lines = (SYSTEM / "proc/meminfo").read_text("utf-8").splitlines()
        kilobyte_counts = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        byte_limits += [1024 * int(kilobytes) for kilobytes in kilobyte_counts]
    for limit_file, usage_file in GROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            group_limit = int((SYSTEM / limit_file).read_text("utf-8"))
            byte_limits.append(group_limit - int((SYSTEM / usage_file).read_text("utf-8")))
    return max(0, min(byte_limits)) if byte_limits else None


def trim_memory() -> None:
    """Gives memory that was freed back to the system, where its C library keeps some."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def large_pages(size: int) -> torch.Tensor | None:
    """Allocates so many bytes, uint8 (size,), in large pages where the system has some to give.

    Pages of 4 kB cost a processor that reads hundreds of megabytes a step a tenth of its time. None
    where large ones cannot be asked for.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        block = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without large pages, or a limit of memory
        return None
    full_block = torch.frombuffer(block, dtype=torch.uint8)
    aligned_start = -full_block.data_ptr() % LARGE_PAGE
    return full_block[aligned_start : aligned_start + size]


def private_file_mappings() -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of the files' parts that this process has mapped for itself alone."""
    for mapping in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        addresses, rights, _, _, inode, *_ = mapping.split(maxsplit=5)
        if inode == "0" or not rights.endswith("p"):
            continue  # of no file, or shared with another process
        range_start, range_end = addresses.split("-")
        yield int(range_start, 16), int(range_end, 16)
