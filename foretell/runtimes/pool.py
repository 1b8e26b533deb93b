"""Rows of many requests in one memory, so that one operation can read and write those of all of
them.

A cache still sees keys and values (KV, C, D) of its own; in the pool they are KV times C / BLOCK
blocks in a row, the same ones in every layer. Memory is only touched, and so only taken, where rows
are written.
"""

from __future__ import annotations

from bisect import insort

import torch

from foretell.core.cache import Cache
from foretell.memory.buffers import Layout
from foretell.ops.rows import zeros

BLOCK = 32  # rows: what OpenVINO's attention counts in on a CPU
BYTES = 256 << 20  # of a segment, at the least


class Segment:
    """One piece of memory. Its first `spare` rows belong to nobody."""

    def __init__(self, layout: Layout, dtype: torch.dtype, rows: int, spare: int):
        self.rows, self.spare = rows, spare
        shapes = sorted(set(layout))
        counts = [(layout.count(s), s[0] * rows) for s in shapes]
        cpu = torch.device("cpu")
        self.keys = [zeros((*n, s[1]), dtype, cpu) for n, s in zip(counts, shapes, strict=True)]
        self.values = [zeros((*n, s[2]), dtype, cpu) for n, s in zip(counts, shapes, strict=True)]
        self.heads = [s[0] for s in shapes]
        self.ranges = [(spare, rows)]  # that are free, in order
        self.returned: list[tuple[int, int]] = []  # to be put among them

    def take(self, rows: int) -> int:
        """The first of so many free rows in a row; below 0: there are none."""
        free = self.free
        for i, (low, high) in enumerate(free):
            if high - low >= rows:
                free[i : i + 1] = [(low + rows, high)] if high - low > rows else []
                return low
        return -1

    def give(self, low: int, high: int) -> None:
        """Makes a range free again. Whoever collects garbage may call this, in the middle of
        anything.
        """
        self.returned.append((low, high))

    @property
    def free(self) -> list[tuple[int, int]]:
        """The free ranges, in order, neighbours joined."""
        while self.returned:
            insort(self.ranges, self.returned.pop())
            joined = self.ranges[:1]
            for start, end in self.ranges[1:]:
                if start == joined[-1][1]:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((start, end))
            self.ranges = joined
        return self.ranges


class Lease:
    """A range of a segment, given back when nobody holds it any more."""

    def __init__(self, segment: Segment, low: int, high: int):
        self.segment, self.low, self.high = segment, low, high

    def __del__(self) -> None:
        self.segment.give(self.low, self.high)


class Pool:
    """Segments for caches of one layout; another one is added when none has room."""

    def __init__(self, layout: Layout, dtype: torch.dtype, spare: int):
        self.layout, self.dtype, self.spare = layout, dtype, spare
        row = sum(heads * (key + value) for heads, key, value in layout) * dtype.itemsize
        self.rows = max(1, BYTES // row // BLOCK) * BLOCK
        self.segments: list[Segment] = []
        self.kind: type[Pooled] = type("Pooled", (Pooled,), {"pool": self})

    def lease(self, rows: int) -> Lease:
        for segment in self.segments:
            if (low := segment.take(rows)) >= 0:
                return Lease(segment, low, low + rows)
        idle = [s for s in self.segments if s.free != [(s.spare, s.rows)]]
        self.segments = [
            *idle,
            Segment(self.layout, self.dtype, max(self.rows, self.spare + rows), self.spare),
        ]
        return self.lease(rows)


class Pooled(Cache):
    """A cache whose rows lie in a pool. Its capacity is a multiple of BLOCK."""

    pool: Pool

    def _allocate(self) -> None:
        self.lease = self.pool.lease(self.capacity)
        low, high, segment = self.lease.low, self.lease.high, self.lease.segment
        self.keys, self.values = (
            [
                m[:, h * low : h * high].unflatten(1, (h, -1))
                for m, h in zip(memory, segment.heads, strict=True)
            ]
            for memory in (segment.keys, segment.values)
        )
        self._name()
