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
from foretell.ops.logits import zero_memory

BLOCK = 32  # rows of a block of OpenVINO's attention on a CPU
SEGMENT_BYTES = 256 << 20  # of a segment, at least


class Segment:
    """A piece of memory, whose rows are leased in ranges. No lease has its first `spare` rows."""

    def __init__(self, layout: Layout, dtype: torch.dtype, row_count: int, spare_rows: int):
        self.rows = row_count
        self.spare = spare_rows
        # Layers of one shape lie in one tensor (layers, heads * rows, width).
        shapes = sorted(set(layout))
        self.heads = [head_count for head_count, _, _ in shapes]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for head_count, key_width, value_width in shapes:
            layers = layout.count((head_count, key_width, value_width))
            for memory, width in ((self.keys, key_width), (self.values, value_width)):
                memory.append(
                    zero_memory((layers, head_count * row_count, width), dtype, torch.device("cpu"))
                )
        self.free_ranges = [(spare_rows, row_count)]  # in order
        self.returned: list[tuple[int, int]] = []  # not yet among the free ranges

    def take_rows(self, row_count: int) -> int:
        """Takes so many consecutive free rows and returns the first; below 0: there are none."""
        free_ranges = self.sorted_free
        for index, (first_row, end_row) in enumerate(free_ranges):
            if end_row - first_row >= row_count:
                remaining = (
                    [(first_row + row_count, end_row)] if end_row - first_row > row_count else []
                )
                free_ranges[index : index + 1] = remaining
                return first_row
        return -1

    def give_back(self, first_row: int, end_row: int) -> None:
        """Makes a range free again.

        The garbage collector may call this at any moment, so that only a list grows.
        """
        self.returned.append((first_row, end_row))

    @property
    def sorted_free(self) -> list[tuple[int, int]]:
        """The free ranges, in order, neighbours joined."""
        while self.returned:
            insort(self.free_ranges, self.returned.pop())
            merged_ranges = self.free_ranges[:1]
            for first_row, end_row in self.free_ranges[1:]:
                if first_row == merged_ranges[-1][1]:
                    merged_ranges[-1] = (merged_ranges[-1][0], end_row)
                else:
                    merged_ranges.append((first_row, end_row))
            self.free_ranges = merged_ranges
        return self.free_ranges


class Lease:
    """A range of a segment's rows, free again when nothing refers to the lease."""

    def __init__(self, segment: Segment, first_row: int, end_row: int):
        self.segment = segment
        self.low = first_row
        self.high = end_row

    def __del__(self) -> None:
        self.segment.give_back(self.low, self.high)


class Pool:
    """Segments for caches of one layout. Where none has room another is added."""

    def __init__(self, layout: Layout, dtype: torch.dtype, spare_rows: int):
        """`spare_rows`: rows of each segment that belong to no cache."""
        self.layout = layout
        self.dtype = dtype
        self.spare = spare_rows
        row_bytes = sum(heads * (key + value) for heads, key, value in layout) * dtype.itemsize
        self.segment_rows = max(1, SEGMENT_BYTES // row_bytes // BLOCK) * BLOCK
        self.segments: list[Segment] = []
        self.cache_type: type[PooledCache] = type("PooledCache", (PooledCache,), {"pool": self})

    def lease_rows(self, row_count: int) -> Lease:
        for segment in self.segments:
            first_row = segment.take_rows(row_count)
            if first_row >= 0:
                return Lease(segment, first_row, first_row + row_count)
        used_segments = [
            other_segment
            for other_segment in self.segments
            if other_segment.sorted_free != [(other_segment.spare, other_segment.rows)]
        ]
        segment_rows = max(self.segment_rows, self.spare + row_count)
        self.segments = [*used_segments, Segment(self.layout, self.dtype, segment_rows, self.spare)]
        return self.lease_rows(row_count)


class PooledCache(Cache):
    """A cache whose rows lie in a pool. Its capacity is a multiple of BLOCK."""

    any_length = False
    first_rows = 8 * BLOCK
    pool: Pool
    own_memory = False  # engine/lanes.py reads it

    def _allocate(self) -> None:
        self.lease = self.pool.lease_rows(self.capacity)
        segment = self.lease.segment
        self.keys = self._own_rows(segment.keys)
        self.values = self._own_rows(segment.values)
        self._name_layers()

    def next_length(self, rows: int) -> int:
        return self.capacity << ((rows - 1) // self.capacity).bit_length()

    def _own_rows(self, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views (layers, heads, capacity, width) of a segment's memory."""
        views = []
        for head_count, rows in zip(self.lease.segment.heads, memory, strict=True):
            leased_rows = rows[:, head_count * self.lease.low : head_count * self.lease.high]
            views.append(leased_rows.unflatten(1, (head_count, -1)))
        return views
