"""Keeps the rows that the newest token attends to the most.

Where a layer has too many rows, those go that got the least of the newest token's attention, the
mean over all heads; so all heads of a layer keep the same tokens.

Paper: Oren et al., Transformers are Multi-State RNNs, arXiv:2401.06104
Guarantee: lossy: rows are given up; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- a prompt is read as a whole, and evicted from behind it, by its last token; the paper evicts token
by token
- with `every` above 1 rows are given up by so many at once, and drafts may be as long
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.kv.base import KV, Attended, best, check_budget, check_every

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Tova(KV):
    """Counts of rows and tokens."""

    role = "evictor"

    budget: int = 1024  # rows of a layer's head
    every: int = 1  # tokens between two evictions

    def __post_init__(self) -> None:
        check_budget("tova", self.budget, 1, "a row")
        check_every("tova", self.every)

    def policy(self, target: Model) -> Newest:
        self.fits(target)
        return Newest(self.budget, self.every)


@dataclass
class Newest(Attended):
    def counts(self, place: int) -> bool:
        return place == self.next_change(place) - 1

    def room(self, length: int) -> int:
        left = super().room(length)
        return left - 1 if left > 1 else left

    def chosen(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        rows = best(received.mean(0), self.budget)
        return rows.expand(len(received), -1)

    def evict(self, cache: Any) -> None:
        super().evict(cache)
        self.received = {layer: torch.zeros_like(held) for layer, held in self.received.items()}
