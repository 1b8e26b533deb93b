"""Attention of queries that leave rows out: what policies are made of that select at read time.

Nothing is given up. Each query selects by itself, from the rows that it sees: committed ones and
those of the nodes above it, as if these were committed; so a text is the same with drafts and
without. Prompts are read as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from foretell.ops.attention import Attention
from foretell.ops.keeping import NEVER, CachePolicy


def attend_to(read: torch.Tensor | None, asked: Attention) -> torch.Tensor:
    """Attention of each query to those rows that it reads, of those that the mask shows it: `read`,
    bool (H, n, rows); None: all. Where nothing is left out it is the ordinary one, bit by bit.
    """
    if read is None or bool(read.all()):
        return asked.whole()
    hidden = torch.zeros(read.shape, dtype=asked.q.dtype, device=asked.q.device)
    hidden = hidden.masked_fill(~read, -torch.inf)
    if asked.mask is not None:
        hidden = hidden + asked.mask
    return replace(asked, mask=hidden).whole()


@dataclass
class Selecting(CachePolicy):
    """Reads a selection behind the prompt, in all layers but the first `dense` ones."""

    dense: int

    plain = False

    def room(self, length: int) -> int:
        return self.prompt - length if length < self.prompt else NEVER

    def watches(self, job: Any) -> bool:
        return bool(job.cache.length >= self.prompt)

    def reads(self, job: Any, asked: Attention) -> torch.Tensor:
        """Which rows each query (H, n) reads, bool (H, n, rows)."""
        raise NotImplementedError

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        read = None if asked.layer < self.dense else self.reads(job, asked)
        return attend_to(read, asked)
