"""Merges the rows of a prompt that matter least into their neighbours, then deletes at one place.

Of the attention that a prompt's rows got of its own tokens the sums are ranked, the same rows for
all heads of a layer. The lowest `ratio` of them are each merged into the nearest kept row, whose
keys and values become the means. What follows stays, and as the text grows by 1/`ratio` tokens one
row is deleted, always at the same place, so that the first and the newest rows are left alone.

Paper: Liu et al., Efficient Inference of Vision Instruction-Following Models with Elastic Cache,
arXiv:2407.18121
Guarantee: lossy: rows are merged and deleted; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- a row is merged by its rank; the published code takes the order of ranks for the ranks, and counts
the merged rows from the first unprotected one
- a prompt shorter than `distance` loses rows behind `start`
- with `every` above 1 rows are deleted by so many at once, and drafts may be as long
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV, NEVER, Chosen, Watching, best, check_every

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class ElasticCache(KV):
    """A share of rows, and counts of them and of tokens."""

    role = "evictor"

    ratio: float = 0.2  # share of the text's rows that is given up
    start: int = 1  # first rows, which stay as they are; so does the last one of the prompt
    distance: int = -25  # where rows are deleted: from the prompt's end, above 0 from its beginning
    every: int = 1  # tokens between two deletions, at least

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise BadConfig.field("elastic-cache:ratio", self.ratio, "at least 0, below 1")
        if self.start < 0:
            raise BadConfig.field("elastic-cache:start", self.start, "at least 0 rows")
        check_every("elastic-cache", self.every)

    def policy(self, target: Model) -> Elastic:
        self.fits(target)
        ratio = Fraction(str(self.ratio))
        return Elastic(ratio=ratio, start=self.start, distance=self.distance, every=self.every)


@dataclass
class Elastic(Watching):
    ratio: Fraction = Fraction(0)  # exact, so that counts of rows are
    start: int = 0
    distance: int = 0
    every: int = 1

    def counts(self, place: int) -> bool:
        return self.ratio > 0 and place < self.prompt

    def gone(self, length: int) -> int:
        """Rows that a text of this length has given up. One beside the protected ones stays."""
        return min(int(self.ratio * length), max(0, length - self.start - 2))

    def room(self, length: int) -> int:
        if length < self.prompt:
            return self.prompt - length
        if not self.ratio:
            return NEVER
        done = self.gone(length - (length - self.prompt) % self.every)
        due = max(ceil((done + 1) / self.ratio), done + 1 + self.start + 2)
        return self.prompt + ceil(Fraction(due - self.prompt, self.every)) * self.every - length

    def change(self, cache: Any) -> None:
        many = cache.base - (cache.length - self.gone(cache.length))
        if cache.length == self.prompt and many:
            self.merge(cache, many)
        elif cache.length > self.prompt:
            self.delete(cache, many)
        self.received = {}  # only the prompt's tokens judge

    def delete(self, cache: Any, many: int) -> None:
        """Deletes so many rows at the place for it, the newest of them never."""
        rest = self.prompt - self.gone(self.prompt)
        place = self.distance if self.distance > 0 else rest + self.distance
        place = max(self.start, min(place, rest - 1))
        rows = torch.tensor([*range(place), *range(place + many, cache.base)], device=cache.device)
        cache.keep_rows([rows.expand(shape[0], -1) for shape in cache.layout])

    def merge(self, cache: Any, many: int) -> None:
        """Merges so many rows of each layer into others."""
        chosen: Chosen = []
        merged = []
        for layer, received in sorted(self.received.items()):
            kept, thrown, anchors = self.classes(received.mean(0), many)
            for rows in (cache.k[layer], cache.v[layer]):
                merged.append(means(rows[:, kept], rows[:, thrown], anchors))
            chosen.append(kept.expand(len(received), -1))
        cache.keep_rows(chosen)
        for layer in range(len(chosen)):
            cache.k[layer][:, : cache.base] = merged[2 * layer]
            cache.v[layer][:, : cache.base] = merged[2 * layer + 1]

    def classes(
        self, scores: torch.Tensor, many: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that stay, those that go, and of each of these the one of the former (as a place
        among them) that it is merged into: the nearest, of two the earlier, but no protected one.
        """
        rows = len(scores)
        middle = scores[self.start : rows - 1]
        stays = torch.zeros(rows, dtype=torch.bool, device=scores.device)
        stays[self.start + best(middle, len(middle) - many)] = True
        free = stays.nonzero()[:, 0]
        stays[: self.start] = stays[-1] = True
        thrown = (~stays).nonzero()[:, 0]
        after = torch.searchsorted(free, thrown).clamp(max=len(free) - 1)
        before = (after - 1).clamp(min=0)
        nearer = thrown - free[before] <= free[after] - thrown
        anchors = self.start + torch.where(nearer, before, after)
        return stays.nonzero()[:, 0], thrown, anchors


def means(rows: torch.Tensor, others: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Of each row (KV, n, D) the mean of it and of those others (KV, m, D) that go `into` it."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.to(wide).index_add(1, into, others.to(wide))
    counts = torch.ones(rows.shape[1], dtype=wide, device=rows.device)
    counts.index_add_(0, into, torch.ones_like(into, dtype=wide))
    return (sums / counts[:, None]).to(rows.dtype)
