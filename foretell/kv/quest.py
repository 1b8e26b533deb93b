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
- torch computes it and reads all keys: fewer rows take part, and no time is saved yet
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.ops.attention import attend
from foretell.ops.keeping import KV, CachePolicy, check_budget

if TYPE_CHECKING:
    from foretell.core.model import Model

LEAST = 3  # pages that are read at least


@dataclass(frozen=True)
class Quest(KV):
    """Counts of rows and layers."""

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
        return Pages(self.budget // self.page, self.page, self.dense)


@dataclass
class Pages(CachePolicy):
    """`bounds`: of each layer the largest and the smallest numbers (2, KV, pages, D)."""

    count: int  # pages that a query head reads
    page: int
    dense: int
    bounds: dict[int, torch.Tensor] = field(default_factory=dict)

    plain = False

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.bounds = {}

    def room(self, length: int) -> int:
        if length < self.prompt:
            return self.prompt - length
        return self.page - length % self.page

    def change(self, cache: Any) -> None:
        """Takes note of the pages that are whole now."""
        pages = cache.base // self.page
        bounds = {}
        for layer, keys in enumerate(cache.k):
            known = self.bounds.get(layer)
            first = 0 if known is None else known.shape[2]
            new = keys[:, first * self.page : pages * self.page].unflatten(1, (-1, self.page))
            made = torch.stack([new.amax(2), new.amin(2)])
            bounds[layer] = made if known is None else torch.cat([known, made], 2)
        self.bounds = bounds

    def watches(self, job: Any) -> bool:
        return job.cache.length >= self.prompt and self.whole(job.cache) > self.count

    def whole(self, cache: Any) -> int:
        """Pages that are whole."""
        return int(cache.base) // self.page

    def attend(
        self,
        job: Any,
        layer: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if layer < self.dense:
            return attend(q, keys, values, mask, scale, softcap, sinks, grouped=False)
        pages = self.whole(job.cache)
        unread = self._unread(q, self.bounds[layer][:, :, :pages])
        hidden = torch.zeros(*q.shape[:2], keys.shape[1], dtype=q.dtype, device=q.device)
        hidden[..., : pages * self.page] = unread.repeat_interleave(self.page, -1) * -1.0
        hidden = hidden.masked_fill(hidden < 0, -torch.inf)
        if mask is not None:
            hidden = hidden + mask
        return attend(q, keys, values, hidden, scale, softcap, sinks, grouped=False)

    def _unread(self, q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Of each query (H, n) the pages that it leaves out (H, n, pages), 1 or 0.

        `bounds` (2, KV, pages, D).
        """
        times = len(q) // bounds.shape[1]
        highest, lowest = bounds.repeat_interleave(times, 1)
        # Positive numbers of the query meet the largest of the keys, negative ones the smallest.
        above = q.clamp(min=0) @ highest.transpose(1, 2) + q.clamp(max=0) @ lowest.transpose(1, 2)
        read = above.topk(self.count, -1).indices
        return torch.ones_like(above).scatter_(-1, read, 0)
