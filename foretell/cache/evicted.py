"""Rows that were given up, and where in the text those stand that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from foretell.cache.policy import copy_rows
from foretell.cache.shared import SharedRows

LEAST_ROWS = 256  # of buffers that became shorter
SPARE_ROWS = 64  # of theirs for what follows


class EvictedRows(SharedRows):
    """The part of a cache that concerns rows given up. `cache.cache.Cache` is the whole."""

    commit: Callable[[Sequence[int]], None]
    reserve: Callable[[int], None]
    offset = 0  # by which positions are less than places in the text

    def compact_rows(self, rows: Iterable[int]) -> None:
        """Keeps these of the committed rows, in order, and gives up the others."""
        assert not self.tokens, "rows are evicted between forwards"
        kept_rows = list(rows)
        self.positions = [self.row_positions()[row] for row in kept_rows]
        self.reserve(self.base)
        self.move_rows(kept_rows, 0)
        self.base = len(kept_rows)

    def keep_rows(self, surviving_rows: Sequence[torch.Tensor | None]) -> None:
        """Keeps of every layer (None: it has no rows) these committed rows of its heads (KV, n),
        each in order, and gives up the others. Rows have no common positions then.
        """
        assert not self.tokens, "rows are evicted between forwards"
        row_counts = {
            layer_rows.shape[1] for layer_rows in surviving_rows if layer_rows is not None
        }
        assert len(row_counts) == 1, "all heads keep as many rows"
        self.reserve(self.base)
        self.gather_rows(surviving_rows)
        self.base = row_counts.pop()

    def give_rows(self, count: int, skipped: int = 0) -> tuple[list[Any], list[Any]]:
        """Copies of keys and of values of every layer (KV, count, D; None: it has no rows) of
        `count` committed rows after the `skipped` ones, which leave the cache: who asks keeps
        them.
        """
        k, v = (copy_rows(layers, slice(skipped, skipped + count)) for layers in (self.k, self.v))
        self.compact_rows([*range(skipped), *range(skipped + count, self.base)])
        self._shrink()
        return k, v

    def _shrink(self) -> None:
        """Lets go of buffers that are far longer than its rows, as those of a long prompt are."""
        buffer_rows = LEAST_ROWS
        while buffer_rows < self.base + SPARE_ROWS:
            buffer_rows *= 2
        if buffer_rows * 4 > self.capacity:
            return
        k, v = (copy_rows(layers, slice(0, self.base)) for layers in (self.k, self.v))
        self.begin_buffers(buffer_rows)
        for layer_buffer, kept_rows in zip((*self.k, *self.v), (*k, *v), strict=True):
            if layer_buffer is not None:
                layer_buffer[:, : self.base] = kept_rows

    def row_positions(self) -> Sequence[int]:
        """Positions in the text of the committed rows' tokens."""
        if self.positions is not None:
            return self.positions
        return range(self.length - self.offset - self.base, self.length - self.offset)
