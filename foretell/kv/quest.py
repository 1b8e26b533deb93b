"""Reads the pages of rows that may matter to a query, and keeps all of them.

Of every page of `page` rows the largest and the smallest number of each key channel are known. They
bound what a query can give to any key of the page; each query head reads the pages of the highest
bounds, and what stands behind the last whole page. The first layers read everything.

Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference,
arXiv:2406.10774
Guarantee: lossy: queries leave rows out; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- rows behind the last whole page are always read, beside the pages
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.ops.attention import Attention
from foretell.ops.keeping import KV, check_budget
from foretell.ops.listed import Listed, highest
from foretell.ops.paging import extremes, upper
from foretell.ops.selecting import Selecting

if TYPE_CHECKING:
    from foretell.core.model import Model

LEAST = 3  # pages that are read at least


@dataclass(frozen=True)
class Quest(KV):
    """Counts of rows and layers."""

    role = "selector"

    budget: int = 1024  # rows in whole pages that a query head reads
    page: int = 16  # rows
    dense: int = 2  # first layers, which read everything

    def __post_init__(self) -> None:
        if self.page < 2:
            raise BadConfig.field("quest:page", self.page, "at least 2 rows")
        check_budget("quest", self.budget, LEAST * self.page, f"{LEAST} pages of {self.page}")
        if self.dense < 0:
            raise BadConfig.field("quest:dense", self.dense, "at least 0 layers")

    def policy(self, target: Model) -> Pages:
        self.fits(target)
        return Pages(self.dense, self.budget // self.page, self.page)


@dataclass
class Pages(Selecting):
    """`bounds`: of each layer the largest and the smallest numbers (KV, pages, 2 * D)."""

    count: int  # pages that a query head reads
    page: int
    bounds: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.bounds = {}

    def room(self, length: int) -> int:
        in_prompt = length < self.prompt
        return super().room(length) if in_prompt else self.page - length % self.page

    def change(self, cache: Any) -> None:
        """Takes note of the pages that are whole now."""
        pages = cache.base // self.page
        bounds = {}
        for layer, keys in enumerate(cache.k):
            known = self.bounds.get(layer)
            first = 0 if known is None else known.shape[1]
            made = extremes(keys[:, first * self.page : pages * self.page], self.page)
            bounds[layer] = made if known is None else torch.cat([known, made], 1)
        self.bounds = bounds

    def watches(self, job: Any) -> bool:
        return super().watches(job) and self.whole(job.cache) > self.count

    def whole(self, cache: Any) -> int:
        """Pages that are whole."""
        return int(cache.base) // self.page

    def reads(self, job: Any, asked: Attention) -> Listed | None:
        pages = self.whole(job.cache)
        bounds = self.bounds[asked.layer][:, :pages]
        return Listed(self.chosen(asked.q, bounds), self.page, pages * self.page)

    def chosen(self, q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """The pages that each query (H, n) reads, ascending (H, n, count).

        `bounds` (KV, pages, 2 * D).
        """
        return highest(upper(q, bounds), self.count)
