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
from foretell.ops.row_attention import Listed, highest, products

SHARE = 4  # at most one of so many chunks is read


@dataclass
class Paged(Selecting):
    """Reads `count` pages of `page` rows, and all rows behind the last whole page."""

    count: int
    page: int
    known: dict[int, torch.Tensor] = field(default_factory=dict)  # of each layer (KV, pages, W)

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.known = {}

    @property
    def bytes(self) -> int:
        return bytes_of(self.known.values())

    def room(self, length: int) -> int:
        in_prompt = length < self.prompt
        return super().room(length) if in_prompt else self.page - length % self.page

    def change(self, cache: Any) -> None:
        """Sums up the pages that are whole now."""
        pages = cache.base // self.page
        known = {}
        for layer, keys in enumerate(cache.k):
            before = self.known.get(layer)
            first = 0 if before is None else before.shape[1]
            made = self.summed_up(keys[:, first * self.page : pages * self.page])
            known[layer] = made if before is None else torch.cat([before, made], 1)
        self.known = known

    def watches(self, job: Any) -> bool:
        return super().watches(job) and self.whole(job.cache) > self.count

    def whole(self, cache: Any) -> int:
        """Pages that are whole."""
        return int(cache.base) // self.page

    def reads(self, job: Any, asked: Attention) -> Listed:
        pages = self.whole(job.cache)
        known = self.known[asked.layer][:, :pages]
        return Listed(self.chosen(asked.q, known), self.page, pages * self.page)

    # --- what a policy decides

    def summed_up(self, keys: torch.Tensor) -> torch.Tensor:
        """What is known of whole pages by their keys (KV, pages * page, D): (KV, pages, W)."""
        raise NotImplementedError

    def chosen(self, q: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """The pages that each query (H, n, D) reads by what is `known` of them (KV, pages, W),
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

    def watches(self, job: Any) -> bool:
        return Selecting.watches(self, job) and self.whole(job.cache) > 1

    def summed_up(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.unflatten(1, (-1, self.page)).mean(2)

    def chosen(self, q: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        scores = products(q, known).unflatten(0, (len(known), -1)).sum(1)
        scores[..., 0] = torch.inf
        return highest(scores, min(self.count, max(1, known.shape[1] // SHARE)))
