"""Rows that were given up, and where in the text those stand that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from foretell.cache.policy import copied
from foretell.cache.shared import SharedRows

LEAST_ROWS = 256  # of buffers that became shorter
SPARE_ROWS = 64  # of theirs for what follows


class EvictedRows(SharedRows):
    """The part of a cache that concerns rows given up. `cache.cache.Cache` is the whole."""

    commit: Callable[[Sequence[int]], None]
    reserve: Callable[[int], None]
    offset = 0  # by which positions are less than places in the text

    def compact(self, rows: Iterable[int]) -> None:
        """Keeps these of the committed rows, in order, and gives up the others."""
        assert not self.tokens, "rows are evicted between forwards"
        keep = list(rows)
        self.positions = [self.row_positions()[row] for row in keep]
        self.reserve(self.base)
        self.move(keep, 0)
        self.base = len(keep)

    def keep_rows(self, chosen: Sequence[torch.Tensor | None]) -> None:
        """Keeps of every layer (None: it has no rows) these committed rows of its heads (KV, n),
        each in order, and gives up the others. Rows have no common positions then.
        """
        assert not self.tokens, "rows are evicted between forwards"
        counts = {rows.shape[1] for rows in chosen if rows is not None}
        assert len(counts) == 1, "all heads keep as many rows"
        self.reserve(self.base)
        self.gather(chosen)
        self.base = counts.pop()

    def give(self, count: int, first: int = 0) -> tuple[list[Any], list[Any]]:
        """Copies of keys and of values of every layer (KV, count, D; None: it has no rows) of
        `count` committed rows behind the `first` ones, which leave the cache: who asks keeps them.
        """
        k, v = (copied(layers, slice(first, first + count)) for layers in (self.k, self.v))
        self.compact([*range(first), *range(first + count, self.base)])
        self._shrink()
        return k, v

    def _shrink(self) -> None:
        """Lets go of buffers that are far longer than its rows, as those of a long prompt are."""
        rows = LEAST_ROWS
        while rows < self.base + SPARE_ROWS:
            rows *= 2
        if rows * 4 > self.capacity:
            return
        k, v = (copied(layers, slice(0, self.base)) for layers in (self.k, self.v))
        self.begin(rows)
        for own, kept in zip((*self.k, *self.v), (*k, *v), strict=True):
            if own is not None:
                own[:, : self.base] = kept

    def row_positions(self) -> Sequence[int]:
        """Of the committed rows, their tokens' positions in the text."""
        if self.positions is not None:
            return self.positions
        return range(self.length - self.offset - self.base, self.length - self.offset)
