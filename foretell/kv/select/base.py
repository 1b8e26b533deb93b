"""Attention of queries that leave rows out: what policies are made of that select at read time.

Nothing is given up. Each query selects by itself, from the rows that it sees: committed ones and
those of the nodes above it, as if these were committed; so a text is the same with drafts and
without. Prompts are read as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foretell.kv.base import NEVER, CachePolicy
from foretell.ops.attention import Attention
from foretell.ops.row_attention import Listed, attend_all, attend_listed


def attend_to(read: Listed | torch.Tensor | None, asked: Attention) -> torch.Tensor:
    """Attention of each query to those rows that it reads, of those that the mask shows it: a list,
    or bool (H or KV, n, rows); None: all. Where nothing is left out it is the ordinary one, but for
    bfloat16 bit by bit.
    """
    if read is None or (isinstance(read, torch.Tensor) and bool(read.all())):
        return attend_all(asked)
    return attend_listed(asked, read)


@dataclass
class Selecting(CachePolicy):
    """Reads a selection behind the prompt, in all layers but the first `dense` ones."""

    dense: int

    plain = False

    def room(self, length: int) -> int:
        return self.prompt - length if length < self.prompt else NEVER

    def watches(self, job: Any) -> bool:
        return bool(job.cache.length >= self.prompt)

    def reads(self, job: Any, asked: Attention) -> Listed | torch.Tensor | None:
        """Which rows each query reads, see `attend_to`."""
        raise NotImplementedError

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        read = None if asked.layer < self.dense else self.reads(job, asked)
        return attend_to(read, asked)


@dataclass
class Ends(Selecting):
    """The first `sinks` rows, the last `window` committed ones, and those of the nodes."""

    sinks: int
    window: int

    def watches(self, job: Any) -> bool:
        return super().watches(job) and bool(job.cache.base > self.sinks + self.window)

    def reads(self, job: Any, asked: Attention) -> Listed:
        first = torch.arange(self.sinks, device=asked.q.device)
        lists = first.expand(len(asked.keys), asked.q.shape[1], -1)
        return Listed(lists, 1, job.cache.base - self.window)
