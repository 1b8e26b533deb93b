"""Attention that reads listed rows of a cache alone, and what rows are found by.

The C library computes it where it is built, for rows of float32 and bfloat16 on a CPU; else torch
does, under a mask: the same up to rounding, in the time that all rows take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from foretell.native import rows as library

if TYPE_CHECKING:
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

    def mask_rows(self, rows: int) -> torch.Tensor:
        """Marks which of so many rows are read, bool (H or KV, n, rows)."""
        mask_shape = (*self.lists.shape[:2], rows)
        row_mask = torch.zeros(mask_shape, dtype=torch.bool, device=self.lists.device)
        row_numbers = self.lists.long()[..., None] * self.page + torch.arange(
            self.page, device=self.lists.device
        )
        row_mask.scatter_(-1, row_numbers.flatten(-2), True)
        row_mask[..., self.first :] = True
        return row_mask


def attend_listed(attention: Attention, selection: Listed | torch.Tensor) -> torch.Tensor:
    """Computes the attention of each query to those rows that it reads, of those that the mask
    shows it -> (n, H, D). `selection`: a list, or bool (H or KV, n, rows). A query that reads
    nothing gets zeros.
    """
    if not _suits_library(attention):
        return listed_by_torch(attention, selection)
    attention_inputs = (
        attention.q,
        attention.keys,
        attention.values,
        attention.scale,
        attention.mask,
    )
    if isinstance(selection, Listed):
        out = library.attend_rows(
            *attention_inputs, lists=selection.lists, page=selection.page, first_row=selection.first
        )
    else:
        out = library.attend_rows(*attention_inputs, read_mask=selection)
    return out.to(attention.q.dtype)


def listed_by_torch(attention: Attention, selection: Listed | torch.Tensor) -> torch.Tensor:
    """Computes `attend_listed` by torch, which reads all rows."""
    if isinstance(selection, Listed):
        selection = selection.mask_rows(attention.keys.shape[1])
    if len(selection) != len(attention.q):
        selection = selection.repeat_interleave(len(attention.q) // len(selection), 0)
    hidden_mask = torch.zeros(selection.shape, dtype=attention.q.dtype, device=attention.q.device)
    hidden_mask = hidden_mask.masked_fill(~selection, -torch.inf)
    if attention.mask is not None:
        hidden_mask = hidden_mask + attention.mask
    out = replace(attention, mask=hidden_mask).full_output()
    reads_nothing = (hidden_mask == -torch.inf).all(-1)
    return out.masked_fill(reads_nothing.t()[..., None], 0)


def attend_all(attention: Attention) -> torch.Tensor:
    """Computes the attention to all rows that the mask shows -> (n, H, D); but for bfloat16 the
    ordinary one, bit by bit.
    """
    if attention.q.dtype is not torch.bfloat16 or not _suits_library(attention):
        return attention.full_output()
    out = library.attend_rows(
        attention.q, attention.keys, attention.values, attention.scale, attention.mask
    )
    return out.to(attention.q.dtype)


def attend_noting(attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the ordinary attention (n, H, D), and the weights that rows get (KV, n, rows), the
    mean over query heads that share keys, in float32 or wider.
    """
    if not _suits_library(attention):
        return noting_by_torch(attention)
    q, keys = attention.q, attention.keys
    row_weights = torch.empty(len(keys), q.shape[1], keys.shape[1])
    out = library.attend_rows(
        q, keys, attention.values, attention.scale, attention.mask, weights=row_weights
    )
    return out.to(q.dtype), row_weights


def noting_by_torch(attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `attend_noting` by torch."""
    weights = attention.weights()
    heads, node_count, rows = weights.shape
    grouped_weights = weights.view(len(attention.keys), -1, node_count, rows)
    row_weights = grouped_weights.mean(
        1, dtype=torch.promote_types(attention.q.dtype, torch.float32)
    )
    mixed_values = grouped_weights.to(attention.values.dtype).flatten(1, 2) @ attention.values
    return mixed_values.view(heads, node_count, -1).transpose(0, 1), row_weights


def query_products(
    q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies q (H, n, D) with all rows of the key head that each shares, of keys (KV, rows, D)
    -> (H, n, rows), in float32 or wider. The products go to `out` where it is given, a part of the
    rows of a contiguous tensor of that format.
    """
    if library.takes_rows(keys) or library.lie_in_columns(keys):
        return library.key_products(q, keys, out)
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    grouped_queries = q.to(wide_dtype).reshape(len(keys), -1, q.shape[-1])
    key_products = (grouped_queries @ keys.to(wide_dtype).transpose(1, 2)).view(*q.shape[:2], -1)
    return key_products if out is None else out.copy_(key_products)


def highest_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The positions of the `count` highest scores (..., rows), ascending; of equal ones the
    first.
    """
    count = min(count, scores.shape[-1])
    if scores.dtype is torch.float32 and library.takes_rows(scores.view(1, -1, 1)):
        return library.highest_positions(scores, count)
    sorted_positions = scores.argsort(dim=-1, descending=True, stable=True)
    return sorted_positions[..., :count].sort(-1).values


def _suits_library(attention: Attention) -> bool:
    is_plain = attention.softcap is None and attention.sinks is None
    return (
        is_plain
        and attention.q.dtype is attention.keys.dtype
        and library.takes_rows(attention.keys, attention.values)
    )
