"""Attention of queries that leave rows out: what policies are made of that select at read time.

Nothing is given up. Each query selects by itself, from the rows that it sees: committed ones and
those of the nodes above it, as if these were committed; so a text is the same with drafts and
without. Prompts are read as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foretell.ops.attention import attend
from foretell.ops.keeping import NEVER, CachePolicy


def attend_to(
    read: torch.Tensor | None,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of each query (H, n) to those rows that it reads, of those that the mask shows it:
    `read`, bool (H, n, rows); None: all. The others are those of ops.attention.attend with
    `grouped=False`. Where nothing is left out it is the ordinary attention, bit by bit.
    """
    if read is None or bool(read.all()):
        grouped = softcap is None and sinks is None and (mask is None or mask.dim() == 2)
        if grouped and mask is not None:
            mask = mask.repeat(len(q) // len(keys), 1)
        return attend(q, keys, values, mask, scale, softcap, sinks, grouped)
    hidden = torch.zeros(read.shape, dtype=q.dtype, device=q.device)
    hidden = hidden.masked_fill(~read, -torch.inf)
    if mask is not None:
        hidden = hidden + mask
    return attend(q, keys, values, hidden, scale, softcap, sinks, grouped=False)


@dataclass
class Selecting(CachePolicy):
    """Reads a selection behind the prompt, in all layers but the first `dense` ones."""

    dense: int

    plain = False

    def room(self, length: int) -> int:
        return self.prompt - length if length < self.prompt else NEVER

    def watches(self, job: Any) -> bool:
        return bool(job.cache.length >= self.prompt)

    def reads(
        self,
        job: Any,
        layer: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Which rows each query (H, n) reads, bool (H, n, rows)."""
        raise NotImplementedError

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
        read = None if layer < self.dense else self.reads(job, layer, q, keys, mask)
        return attend_to(read, q, keys, values, mask, scale, softcap, sinks)
