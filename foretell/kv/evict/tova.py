"""Keeps the rows that the newest token attends to the most.

Where a layer has too many rows, those go that got the least of the newest token's attention, the
mean over all heads; so all heads of a layer keep the same tokens.

Paper: Oren et al., Transformers are Multi-State RNNs, arXiv:2401.06104
Guarantee: lossy: rows are given up; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- a prompt is read as a whole, and evicted from when it is read, by its last token; the paper evicts
token by token
- with `every` above 1 rows are given up by so many at once, and drafts may be as long
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import Range
from foretell.kv.base import KV, Attended, check_budget, top_rows

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Tova(KV):
    """Counts of rows and tokens."""

    role = "evictor"

    budget: int = 1024  # rows of a layer's head
    every: Annotated[int, Range(1)] = 1  # tokens between two evictions

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("tova", self.budget, 1, "a row")

    def build_policy(self, target: Model) -> Newest:
        self.check_target(target)
        return Newest(self.budget, self.every)


@dataclass
class Newest(Attended):
    def counts_token(self, token_position: int) -> bool:
        return token_position == self.next_change(token_position) - 1

    def room_left(self, length: int) -> int:
        eviction_room = super().room_left(length)
        return eviction_room - 1 if eviction_room > 1 else eviction_room

    def choose_rows(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        attended_rows = top_rows(received.mean(0), self.budget)
        return attended_rows.expand(len(received), -1)

    def evict_rows(self, cache: Any) -> None:
        super().evict_rows(cache)
        self.received = {
            layer: torch.zeros_like(layer_scores) for layer, layer_scores in self.received.items()
        }
