"""Memory that weights no longer need, and sizes that keep what torch remembers of them few."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

DONTNEED = 4  # Linux: MADV_DONTNEED
SIZES = (
    1,
    2,
    3,
    4,
    6,
    8,
    10,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
    512,
)


def rounded(n: int) -> int:
    """The number of rows to compute where `n` are wanted.

    For every number of rows that a product of 16-bit numbers is asked for, oneDNN makes a kernel,
    in about as much time as the product takes, and torch keeps up to a thousand of them, of 0.6 MB
    each: prompts of any length would fill that. The rows added cost a forward a few percent, 15 at
    most (dev/LOG.md).
    """
    return next((size for size in SIZES if size >= n), -(-n // 256) * 256)


def release(tensors: Iterable[torch.Tensor]) -> int:
    """Takes pages of a mapped file that hold these tensors, whose numbers nobody needs again, out
    of memory.

    Returns how many bytes; 0 where the system is not Linux, or the tensors lie elsewhere: other
    memory is left alone. A mapping stays as long as one tensor of its file is in use, and all its
    pages that were read stay with it.
    """
    if sys.platform != "linux":
        return 0
    wanted, size = [], mmap.PAGESIZE
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            low, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            first, last = (
                -(-low // size) * size,
                end // size * size,
            )  # of the pages that hold nothing else
            wanted += [(first, last)] if first < last else []
    done, libc = 0, ctypes.CDLL(None)
    for line in (
        Path("/proc/self/maps").read_text("utf-8", "replace").splitlines() if wanted else ()
    ):
        places, rights, _, _, inode, *_ = line.split(maxsplit=5)
        if inode == "0" or not rights.endswith("p"):
            continue  # of no file, or shared with another process
        begin, stop = (int(place, 16) for place in places.split("-"))
        for first, last in wanted:
            if begin <= first and last <= stop:
                start, length = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
                done += last - first if libc.madvise(start, length, DONTNEED) == 0 else 0
    return done
