"""Attention that reads listed rows of a cache alone, and what rows are found by.

The C library computes it where it is built, for rows of float32 and bfloat16 on a CPU; else torch
does, under a mask: the same up to rounding, in the time that all rows take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from foretell.native import rows as library
from foretell.ops.attention import Attention


@dataclass(frozen=True)
class Listed:
    """Rows that queries read: those of the pages of `page` rows in `lists`, ascending, whole
    numbers (H or KV, n, pages), and all rows from `first` on. Lists are of each query head, or of
    each key head.
    """

    lists: torch.Tensor
    page: int
    first: int

    def read(self, rows: int) -> torch.Tensor:
        """Which of so many rows, bool (H or KV, n, rows)."""
        shape = (*self.lists.shape[:2], rows)
        read = torch.zeros(shape, dtype=torch.bool, device=self.lists.device)
        numbers = self.lists.long()[..., None] * self.page + torch.arange(
            self.page, device=self.lists.device
        )
        read.scatter_(-1, numbers.flatten(-2), True)
        read[..., self.first :] = True
        return read


def attend_listed(asked: Attention, read: Listed | torch.Tensor) -> torch.Tensor:
    """Attention of each query to those rows that it reads, of those that the mask shows it -> (n,
    H, D). `read`: a list, or bool (H or KV, n, rows). Who reads nothing gets zeros.
    """
    if not _by_library(asked):
        return listed_by_torch(asked, read)
    rows = asked.q, asked.keys, asked.values, asked.scale, asked.mask
    if isinstance(read, Listed):
        out = library.read(*rows, lists=read.lists, page=read.page, first=read.first)
    else:
        out = library.read(*rows, read=read)
    return out.to(asked.q.dtype)


def listed_by_torch(asked: Attention, read: Listed | torch.Tensor) -> torch.Tensor:
    """The same by torch, which reads all rows."""
    if isinstance(read, Listed):
        read = read.read(asked.keys.shape[1])
    if len(read) != len(asked.q):
        read = read.repeat_interleave(len(asked.q) // len(read), 0)
    hidden = torch.zeros(read.shape, dtype=asked.q.dtype, device=asked.q.device)
    hidden = hidden.masked_fill(~read, -torch.inf)
    if asked.mask is not None:
        hidden = hidden + asked.mask
    out = replace(asked, mask=hidden).whole()
    nothing = (hidden == -torch.inf).all(-1)
    return out.masked_fill(nothing.t()[..., None], 0)


def attend_all(asked: Attention) -> torch.Tensor:
    """Attention to all rows that the mask shows -> (n, H, D); but for bfloat16 the ordinary one,
    bit by bit.
    """
    if asked.q.dtype is not torch.bfloat16 or not _by_library(asked):
        return asked.whole()
    out = library.read(asked.q, asked.keys, asked.values, asked.scale, asked.mask)
    return out.to(asked.q.dtype)


def attend_noting(asked: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The ordinary attention (n, H, D), and what rows get of it (KV, n, rows), the mean over query
    heads that share keys, in float32 or wider.
    """
    if not _by_library(asked):
        return noting_by_torch(asked)
    q, keys = asked.q, asked.keys
    given = torch.empty(len(keys), q.shape[1], keys.shape[1])
    out = library.read(q, keys, asked.values, asked.scale, asked.mask, weights=given)
    return out.to(q.dtype), given


def noting_by_torch(asked: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch."""
    weights = asked.weights()
    heads, new, rows = weights.shape
    grouped = weights.view(len(asked.keys), -1, new, rows)
    given = grouped.mean(1, dtype=torch.promote_types(asked.q.dtype, torch.float32))
    mixed = grouped.to(asked.values.dtype).flatten(1, 2) @ asked.values
    return mixed.view(heads, new, -1).transpose(0, 1), given


def products(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """q (H, n, D) with all rows of the key head that each shares, of keys (KV, rows, D) -> (H, n,
    rows), in float32 or wider. They go to `out` where it is given, a part of the rows of a
    contiguous tensor of that format.
    """
    if library.takes(keys) or library.lie_in_columns(keys):
        return library.products(q, keys, out)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).reshape(len(keys), -1, q.shape[-1])
    found = (queries @ keys.to(wide).transpose(1, 2)).view(*q.shape[:2], -1)
    return found if out is None else out.copy_(found)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` highest scores (..., rows), ascending; of equal ones the first."""
    count = min(count, scores.shape[-1])
    if scores.dtype is torch.float32 and library.takes(scores.view(1, -1, 1)):
        return library.highest(scores, count)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(-1).values


def _by_library(asked: Attention) -> bool:
    plain = asked.softcap is None and asked.sinks is None
    return plain and asked.q.dtype is asked.keys.dtype and library.takes(asked.keys, asked.values)
