"""The rows of many caches in one memory, so that one operation can read and write all of them.

A cache still has keys and values (KV, C, D) of its own. In the pool they are KV * C / BLOCK
consecutive blocks, the same ones in every layer. Pages are taken from the system only when rows are
written to them.
"""

from __future__ import annotations

from bisect import insort

import torch

from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.ops.logits import zeros

BLOCK = 32  # rows of a block of OpenVINO's attention on a CPU
SEGMENT_BYTES = 256 << 20  # of a segment, at least


class Segment:
    """One piece of memory, whose rows are leased in ranges. No lease has its first `spare` rows."""

    def __init__(self, layout: Layout, dtype: torch.dtype, rows: int, spare: int):
        self.rows = rows
        self.spare = spare
        # Layers of one shape lie in one tensor (layers, heads * rows, width).
        shapes = sorted(set(layout))
        self.heads = [heads for heads, _, _ in shapes]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for heads, key_width, value_width in shapes:
            layers = layout.count((heads, key_width, value_width))
            for memory, width in ((self.keys, key_width), (self.values, value_width)):
                memory.append(zeros((layers, heads * rows, width), dtype, torch.device("cpu")))
        self.free_ranges = [(spare, rows)]  # in order
        self.returned: list[tuple[int, int]] = []  # not yet among the free ranges

    def take(self, rows: int) -> int:
        """The first of so many consecutive free rows, which are taken; below 0: there are none."""
        free = self.free
        for i, (low, high) in enumerate(free):
            if high - low >= rows:
                rest = [(low + rows, high)] if high - low > rows else []
                free[i : i + 1] = rest
                return low
        return -1

    def give(self, low: int, high: int) -> None:
        """Makes a range free again.

        The garbage collector may call this at any moment, so that only a list grows.
        """
        self.returned.append((low, high))

    @property
    def free(self) -> list[tuple[int, int]]:
        """The free ranges, in order, neighbours joined."""
        while self.returned:
            insort(self.free_ranges, self.returned.pop())
            joined = self.free_ranges[:1]
            for low, high in self.free_ranges[1:]:
                if low == joined[-1][1]:
                    joined[-1] = (joined[-1][0], high)
                else:
                    joined.append((low, high))
            self.free_ranges = joined
        return self.free_ranges


class Lease:
    """A range of a segment's rows, free again when nothing refers to the lease."""

    def __init__(self, segment: Segment, low: int, high: int):
        self.segment = segment
        self.low = low
        self.high = high

    def __del__(self) -> None:
        self.segment.give(self.low, self.high)


class Pool:
    """Segments for caches of one layout. Where none has room another is added."""

    def __init__(self, layout: Layout, dtype: torch.dtype, spare: int):
        """`spare`: rows of each segment that belong to no cache."""
        self.layout = layout
        self.dtype = dtype
        self.spare = spare
        row_bytes = sum(heads * (key + value) for heads, key, value in layout) * dtype.itemsize
        self.segment_rows = max(1, SEGMENT_BYTES // row_bytes // BLOCK) * BLOCK
        self.segments: list[Segment] = []
        self.cache_type: type[PooledCache] = type("PooledCache", (PooledCache,), {"pool": self})

    def lease(self, rows: int) -> Lease:
        for segment in self.segments:
            low = segment.take(rows)
            if low >= 0:
                return Lease(segment, low, low + rows)
        used = [s for s in self.segments if s.free != [(s.spare, s.rows)]]
        size = max(self.segment_rows, self.spare + rows)
        self.segments = [*used, Segment(self.layout, self.dtype, size, self.spare)]
        return self.lease(rows)


class PooledCache(Cache):
    """A cache whose rows lie in a pool. Its capacity is a multiple of BLOCK."""

    any_length = False
    first_rows = 8 * BLOCK
    pool: Pool
    own_memory = False  # engine/lanes.py reads it

    def _allocate(self) -> None:
        self.lease = self.pool.lease(self.capacity)
        segment = self.lease.segment
        self.keys = self._own_rows(segment.keys)
        self.values = self._own_rows(segment.values)
        self._name_layers()

    def longer(self, rows: int) -> int:
        return self.capacity << ((rows - 1) // self.capacity).bit_length()

    def _own_rows(self, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views (layers, heads, capacity, width) of a segment's memory."""
        views = []
        for heads, rows in zip(self.lease.segment.heads, memory, strict=True):
            leased = rows[:, heads * self.lease.low : heads * self.lease.high]
            views.append(leased.unflatten(1, (heads, -1)))
        return views
