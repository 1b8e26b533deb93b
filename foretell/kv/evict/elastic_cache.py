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
- a prompt shorter than `distance` loses rows after `start`
- with `every` above 1 rows are deleted by so many at once, and drafts may be as long
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import Range
from foretell.kv.base import KV, NEVER, Chosen, Watching, top_rows

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class ElasticCache(KV):
    """A share of rows, and counts of them and of tokens."""

    role = "evictor"

    # share of the text's rows that is given up
    ratio: Annotated[float, Range(0, 1, open_high=True)] = 0.2
    # first rows, which stay as they are; so does the last one of the prompt
    start: Annotated[int, Range(0)] = 1
    distance: int = -25  # where rows are deleted: from the prompt's end, above 0 from its beginning
    every: Annotated[int, Range(1)] = 1  # tokens between two deletions, at least

    def build_policy(self, target: Model) -> Elastic:
        self.check_target(target)
        exact_ratio = Fraction(str(self.ratio))
        return Elastic(
            ratio=exact_ratio, start=self.start, distance=self.distance, every=self.every
        )


@dataclass
class Elastic(Watching):
    ratio: Fraction = Fraction(0)  # exact, so that counts of rows are
    start: int = 0
    distance: int = 0
    every: int = 1

    def counts_token(self, token_position: int) -> bool:
        return self.ratio > 0 and token_position < self.prompt

    def count_gone(self, length: int) -> int:
        """Rows that a text of this length has given up. One beside the protected ones stays."""
        return min(int(self.ratio * length), max(0, length - self.start - 2))

    def room_left(self, length: int) -> int:
        if length < self.prompt:
            return self.prompt - length
        if not self.ratio:
            return NEVER
        given_up = self.count_gone(length - (length - self.prompt) % self.every)
        due_length = max(ceil((given_up + 1) / self.ratio), given_up + 1 + self.start + 2)
        return (
            self.prompt + ceil(Fraction(due_length - self.prompt, self.every)) * self.every - length
        )

    def change_rows(self, cache: Any) -> None:
        excess_rows = cache.base - (cache.length - self.count_gone(cache.length))
        if cache.length == self.prompt and excess_rows:
            self.merge_rows(cache, excess_rows)
        elif cache.length > self.prompt:
            self.delete_rows(cache, excess_rows)
        self.received = {}  # only the prompt's tokens judge

    def delete_rows(self, cache: Any, excess_rows: int) -> None:
        """Deletes so many rows at the place for it, the newest of them never."""
        prompt_rows = self.prompt - self.count_gone(self.prompt)
        first_deleted = self.distance if self.distance > 0 else prompt_rows + self.distance
        first_deleted = max(self.start, min(first_deleted, prompt_rows - 1))
        surviving_rows = torch.tensor(
            [*range(first_deleted), *range(first_deleted + excess_rows, cache.base)],
            device=cache.device,
        )
        cache.keep_rows([surviving_rows.expand(shape[0], -1) for shape in cache.layout])

    def merge_rows(self, cache: Any, excess_rows: int) -> None:
        """Merges so many rows of each layer into others."""
        surviving_rows: Chosen = []
        merged_buffers = []
        for layer, received in sorted(self.received.items()):
            kept_rows, thrown_rows, anchors = self.classify_rows(received.mean(0), excess_rows)
            for rows in (cache.k[layer], cache.v[layer]):
                merged_buffers.append(
                    merged_means(rows[:, kept_rows], rows[:, thrown_rows], anchors)
                )
            surviving_rows.append(kept_rows.expand(len(received), -1))
        cache.keep_rows(surviving_rows)
        for layer in range(len(surviving_rows)):
            cache.k[layer][:, : cache.base] = merged_buffers[2 * layer]
            cache.v[layer][:, : cache.base] = merged_buffers[2 * layer + 1]

    def classify_rows(
        self, scores: torch.Tensor, excess_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that stay, those that go, and for each of the latter the row it is merged into,
        as a place among the former: the nearest, of two the earlier, but no protected one.
        """
        row_count = len(scores)
        middle_scores = scores[self.start : row_count - 1]
        stay_mask = torch.zeros(row_count, dtype=torch.bool, device=scores.device)
        stay_mask[self.start + top_rows(middle_scores, len(middle_scores) - excess_rows)] = True
        free_rows = stay_mask.nonzero()[:, 0]
        stay_mask[: self.start] = stay_mask[-1] = True
        thrown_rows = (~stay_mask).nonzero()[:, 0]
        next_anchor = torch.searchsorted(free_rows, thrown_rows).clamp(max=len(free_rows) - 1)
        previous_anchor = (next_anchor - 1).clamp(min=0)
        previous_nearer = (
            thrown_rows - free_rows[previous_anchor] <= free_rows[next_anchor] - thrown_rows
        )
        anchors = self.start + torch.where(previous_nearer, previous_anchor, next_anchor)
        return stay_mask.nonzero()[:, 0], thrown_rows, anchors


def merged_means(rows: torch.Tensor, merged_rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The mean of each row (KV, n, D) and of those merged rows (KV, m, D) that go `into` it."""
    wide_type = torch.promote_types(rows.dtype, torch.float32)
    row_sums = rows.to(wide_type).index_add(1, into, merged_rows.to(wide_type))
    row_counts = torch.ones(rows.shape[1], dtype=wide_type, device=rows.device)
    row_counts.index_add_(0, into, torch.ones_like(into, dtype=wide_type))
    return (row_sums / row_counts[:, None]).to(rows.dtype)
