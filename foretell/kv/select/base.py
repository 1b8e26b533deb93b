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


def attend_to(read_rows: Listed | torch.Tensor | None, attention: Attention) -> torch.Tensor:
    """Attention of each query to those rows that it reads, of those that the mask shows it: a list,
    or bool (H or KV, n, rows); None: all. Where nothing is left out it is the ordinary one, but for
    bfloat16 bit by bit.
    """
    if read_rows is None or (isinstance(read_rows, torch.Tensor) and bool(read_rows.all())):
        return attend_all(attention)
    return attend_listed(attention, read_rows)


@dataclass
class Selecting(CachePolicy):
    """Reads a selection after the prompt, in all layers but the first `dense` ones."""

    dense: int

    plain = False

    def room_left(self, length: int) -> int:
        return self.prompt - length if length < self.prompt else NEVER

    def watches_job(self, job: Any) -> bool:
        return bool(job.cache.length >= self.prompt)

    def select_rows(self, job: Any, attention: Attention) -> Listed | torch.Tensor | None:
        """Which rows each query reads, see `attend_to`."""
        raise NotImplementedError

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        read_rows = None if attention.layer < self.dense else self.select_rows(job, attention)
        return attend_to(read_rows, attention)


@dataclass
class Ends(Selecting):
    """The first `sinks` rows, the last `window` committed ones, and those of the nodes."""

    sinks: int
    window: int

    def watches_job(self, job: Any) -> bool:
        return super().watches_job(job) and bool(job.cache.base > self.sinks + self.window)

    def select_rows(self, job: Any, attention: Attention) -> Listed:
        sink_rows = torch.arange(self.sinks, device=attention.q.device)
        row_lists = sink_rows.expand(len(attention.keys), attention.q.shape[1], -1)
        return Listed(row_lists, 1, job.cache.base - self.window)
