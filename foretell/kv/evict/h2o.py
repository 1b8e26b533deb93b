"""Keeps the rows that received the most attention so far, and the most recent ones.

For every key head the attention that a row got of all nodes since is added up. Where there are too
many rows, those of the lowest sums go, but for the `recent` last ones.

Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models, arXiv:2306.14048
Guarantee: lossy: rows are given up; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- a prompt is read as a whole, and evicted from when it is read; the paper evicts token by token
- `budget` counts rows; the paper's setting, a fifth of the prompt, is for the caller to work out
- query heads that share a key head count by their mean
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
class H2O(KV):
    """Counts of rows and tokens."""

    role = "evictor"

    budget: int = 1024  # rows of a layer's head
    recent: int = 0  # of them for the last tokens; 0: half of them
    every: Annotated[int, Range(1)] = 1  # tokens between two evictions

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("h2o", self.budget, max(2, self.recent + 1), "recent and other rows")

    def build_policy(self, target: Model) -> HeavyHitters:
        self.check_target(target)
        return HeavyHitters(self.budget, self.every, recent=self.recent or self.budget // 2)


@dataclass
class HeavyHitters(Attended):
    recent: int = 1

    def counts_token(self, token_position: int) -> bool:
        return True

    def choose_rows(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        heads, row_count = received.shape
        heavy_rows = top_rows(received[:, : row_count - self.recent], self.budget - self.recent)
        recent_rows = torch.arange(row_count - self.recent, row_count, device=received.device)
        return torch.cat([heavy_rows, recent_rows.expand(heads, -1)], 1)
