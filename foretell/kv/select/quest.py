"""Reads the pages of rows that may matter to a query, and keeps all of them.

Of every page of `page` rows the largest and the smallest number of each key channel are known. They
bound what a query can give to any key of the page; each query head reads the pages of the highest
bounds, and what follows the last whole page. The first layers read everything.

Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference,
arXiv:2406.10774
Guarantee: lossy: queries leave rows out; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- rows after the last whole page are always read, beside the pages
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

from foretell.core.settings import Range
from foretell.kv.base import KV, check_budget
from foretell.kv.select.paged import Paged
from foretell.kv.select.paging import page_extremes, upper_bounds
from foretell.ops.row_attention import highest_positions

if TYPE_CHECKING:
    from foretell.core.model import Model

LEAST = 3  # pages that are read at least


@dataclass(frozen=True)
class Quest(KV):
    """Counts of rows and layers."""

    role = "selector"

    budget: int = 1024  # rows in whole pages that a query head reads
    page: Annotated[int, Range(2)] = 16  # rows
    dense: Annotated[int, Range(0)] = 2  # first layers, which read everything

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("quest", self.budget, LEAST * self.page, f"{LEAST} pages of {self.page}")

    def build_policy(self, target: Model) -> Pages:
        self.check_target(target)
        return Pages(self.dense, self.budget // self.page, self.page)


@dataclass
class Pages(Paged):
    """Knows of each page the largest and the smallest numbers (KV, pages, 2 * D)."""

    def sum_up_pages(self, keys: torch.Tensor) -> torch.Tensor:
        return page_extremes(keys, self.page)

    def choose_pages(self, q: torch.Tensor, page_sums: torch.Tensor) -> torch.Tensor:
        return highest_positions(upper_bounds(q, page_sums), self.count)
