"""Pages of rows that a query chooses by what is known of each: what selecting policies are made of.

Nothing is given up. What is known of a page is summed up when it is whole, and never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.cache.buffers import bytes_of
from foretell.kv.select.base import Selecting
from foretell.ops.attention import Attention
from foretell.ops.row_attention import Listed, highest_positions, query_products

SHARE = 4  # at most one of so many chunks is read


@dataclass
class Paged(Selecting):
    """Reads `count` pages of `page` rows, and all rows after the last whole page."""

    count: int
    page: int
    page_sums: dict[int, torch.Tensor] = field(default_factory=dict)  # of each layer (KV, pages, W)

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.page_sums = {}

    @property
    def bytes(self) -> int:
        return bytes_of(self.page_sums.values())

    def room_left(self, length: int) -> int:
        in_prompt = length < self.prompt
        return super().room_left(length) if in_prompt else self.page - length % self.page

    def change_rows(self, cache: Any) -> None:
        """Sums up the pages that are whole now."""
        page_count = cache.base // self.page
        page_sums = {}
        for layer, keys in enumerate(cache.k):
            earlier_sums = self.page_sums.get(layer)
            first_page = 0 if earlier_sums is None else earlier_sums.shape[1]
            new_sums = self.sum_up_pages(keys[:, first_page * self.page : page_count * self.page])
            page_sums[layer] = (
                new_sums if earlier_sums is None else torch.cat([earlier_sums, new_sums], 1)
            )
        self.page_sums = page_sums

    def watches_job(self, job: Any) -> bool:
        return super().watches_job(job) and self.count_pages(job.cache) > self.count

    def count_pages(self, cache: Any) -> int:
        """Pages that are whole."""
        return int(cache.base) // self.page

    def select_rows(self, job: Any, attention: Attention) -> Listed:
        page_count = self.count_pages(job.cache)
        page_sums = self.page_sums[attention.layer][:, :page_count]
        return Listed(self.choose_pages(attention.q, page_sums), self.page, page_count * self.page)

    # --- what a policy decides

    def sum_up_pages(self, keys: torch.Tensor) -> torch.Tensor:
        """Sums up whole pages by their keys (KV, pages * page, D): (KV, pages, W)."""
        raise NotImplementedError

    def choose_pages(self, q: torch.Tensor, page_sums: torch.Tensor) -> torch.Tensor:
        """The pages that each query (H, n, D) reads by what is `page_sums` of them (KV, pages, W),
        ascending (H or KV, n, count).
        """
        raise NotImplementedError


@dataclass
class Chunks(Paged):
    """Chunks of which the mean key is known: each key head reads those that its queries are nearest
    to, the first always, and at most a quarter of them.

    Source: Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with
    Hierarchical Speculative Decoding" (arXiv 2404.11912), section 4.1.
    """

    def watches_job(self, job: Any) -> bool:
        return Selecting.watches_job(self, job) and self.count_pages(job.cache) > 1

    def sum_up_pages(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.unflatten(1, (-1, self.page)).mean(2)

    def choose_pages(self, q: torch.Tensor, page_sums: torch.Tensor) -> torch.Tensor:
        page_scores = query_products(q, page_sums).unflatten(0, (len(page_sums), -1)).sum(1)
        page_scores[..., 0] = torch.inf
        return highest_positions(page_scores, min(self.count, max(1, page_sums.shape[1] // SHARE)))
