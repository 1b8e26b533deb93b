"""Key heads that see the first rows and the last ones alone, beside others that see all.

    rows of all heads    0 .. first-1 | ...................... | the last ones, at least `recent`
    of the other heads                | held beside the cache  |

What a query sees is told by positions, so it does not depend on when rows leave the cache, or on
the pieces in which a text is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from foretell.cache.buffers import bytes_of
from foretell.kv.base import NEVER
from foretell.kv.store.holding import Holding, Layers, Part
from foretell.ops.attention import Attention, merge_parts
from foretell.ops.row_attention import attend_all


class Held(NamedTuple):
    """Rows of some key heads of one layer."""

    keys: torch.Tensor  # (KV, n, D)
    values: torch.Tensor

    def read_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are read."""
        return self.keys, self.values


@dataclass
class Ragged(Holding):
    """`streaming`, bool (L, KV): the heads that see the `first_rows` rows and the `recent` last
    ones, their own included. The rows that lie between leave the cache, by blocks.
    """

    streaming: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    held_rows: Mapping[int, Any] = field(
        default_factory=dict
    )  # of each layer its other heads' rows
    near_rows: tuple[Any, torch.Tensor] | None = None  # of the last job, see `_near_rows`
    # Masks that `limit_attention` made in the last job, by which heads stream and by the job's
    # mask.
    masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = field(default_factory=dict)

    @property
    def drops_rows(self) -> bool:
        """Whether rows leave the cache."""
        return bool(self.streaming.any())

    def visible_count(self, length: int) -> int:
        """The last rows that streaming heads see of a text after so many tokens."""
        return self.recent

    def shows_all(self, length: int) -> bool:
        """Whether all heads see all rows after so many tokens."""
        return not self.drops_rows or length < self.first_rows + self.visible_count(length)

    def clear_held(self) -> None:
        self.held_rows, self.near_rows, self.masks = {}, None, {}

    @property
    def holds_rows(self) -> bool:
        return bool(self.held_rows)

    def room_left(self, length: int) -> int:
        if not self.drops_rows:
            return NEVER
        # Forwards end where streaming heads begin to miss rows: all nodes are watched, or none.
        rows_beyond = length - self.first_rows - self.visible_count(length)
        return -rows_beyond if rows_beyond < 0 else self.block - rows_beyond % self.block

    def change_rows(self, cache: Any) -> None:
        block_count = (
            cache.base - self.first_rows - self.visible_count(cache.length)
        ) // self.block
        if self.drops_rows and block_count > 0:
            self.hold_rows(*cache.give_rows(block_count * self.block, self.first_rows))

    def watches_job(self, job: Any) -> bool:
        return not self.shows_all(job.cache.length)

    def hold_rows(self, keys: Layers, values: Layers) -> None:
        held_rows = dict(self.held_rows)
        for layer, streaming in enumerate(self.streaming):
            if not bool(streaming.all()):
                full_heads = ~streaming
                held_rows[layer] = self.join_rows(
                    held_rows.get(layer), keys[layer][full_heads], values[layer][full_heads]
                )
        self.held_rows = held_rows

    def join_rows(self, held_rows: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Appends rows to those held of a layer, which are None or were made here before."""
        if held_rows is None:
            return Held(keys, values)
        return Held(torch.cat([held_rows.keys, keys], 1), torch.cat([held_rows.values, values], 1))

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        own_attention = self.limit_attention(job, attention)
        held_parts = self.attend_held(job, attention)
        return (
            merge_parts([own_attention.part(), *held_parts]).to(attention.q.dtype)
            if held_parts
            else attend_all(own_attention)
        )

    def limit_attention(self, job: Any, attention: Attention) -> Attention:
        """Limits attention to those rows of the cache that each query may see."""
        self._near_rows(job)  # with another job, masks are made anew
        mask_key = tuple(self.streaming[attention.layer].tolist()), attention.q.dtype
        known_mask = self.masks.get(mask_key)
        if known_mask is None or known_mask[0] is not attention.mask:
            known_mask = self.masks[mask_key] = (
                attention.mask,
                mask_rows(attention, self.visible_rows(job, attention)).mask,
            )
        return replace(attention, mask=known_mask[1])

    def visible_rows(self, job: Any, attention: Attention) -> torch.Tensor | None:
        """Which rows of the cache each query may see, of those that its mask shows it, bool
        (H, n, rows); None: all.
        """
        streaming = self.streaming[attention.layer]
        near_rows = self._near_rows(job)
        if not bool(streaming.any()) or bool(near_rows.all()):
            return None
        visible_mask: torch.Tensor = near_rows | ~streaming[:, None, None].to(near_rows.device)
        return visible_mask.repeat_interleave(len(attention.q) // len(visible_mask), 0)

    def _near_rows(self, job: Any) -> torch.Tensor:
        """Which rows of the cache streaming heads see, bool (n, rows). Layers share it."""
        cache = job.cache
        job_key = (cache.length, cache.base, len(job.tokens), tuple(job.scratch_positions))
        if self.near_rows is None or self.near_rows[0] != job_key:
            node_positions, row_positions = text_positions(job)
            visible_count = self.visible_count(cache.length)
            near_rows = (row_positions < self.first_rows) | (
                node_positions[:, None] - row_positions < visible_count
            )
            self.near_rows, self.masks = (job_key, near_rows), {}
        return self.near_rows[1]

    def attend_held(self, job: Any, attention: Attention) -> list[Part]:
        held_rows = self.held_rows.get(attention.layer)
        if held_rows is None:
            return []
        full_heads = self.full_heads(attention)
        full_queries = attention.q[full_heads]
        keys, values = held_rows.read_rows()
        attention_part = replace(attention, q=full_queries).over(
            keys, values, self.held_mask(job, attention, full_queries)
        )
        if bool(full_heads.all()):
            return [attention_part]
        all_outputs = attention_part[0].new_zeros(
            attention_part[0].shape[0], len(attention.q), attention_part[0].shape[-1]
        )
        log_sums = attention_part[1].new_full(all_outputs.shape[:2], -torch.inf)
        all_outputs[:, full_heads], log_sums[:, full_heads] = attention_part
        return [(all_outputs, log_sums)]

    def held_mask(self, job: Any, attention: Attention, q: torch.Tensor) -> torch.Tensor | None:
        """Additive, of queries (H, n, D) that read held rows (H, n, held); None: they read all."""
        return None

    def full_heads(self, attention: Attention) -> torch.Tensor:
        """The query heads of a layer that see all, bool (H,)."""
        streaming = self.streaming[attention.layer].to(attention.q.device)
        return ~streaming.repeat_interleave(len(attention.q) // len(streaming))

    @property
    def bytes(self) -> int:
        """Bytes of all that is held beside the cache."""
        return bytes_of(row_part for rows in self.held_rows.values() for row_part in rows)


def text_positions(job: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the text of a job's new nodes (n,), and of all rows that they follow or
    are (rows,).
    """
    cache = job.cache
    row_positions = torch.tensor(
        [*cache.row_positions(), *job.scratch_positions], device=cache.device
    )
    return row_positions[len(row_positions) - len(job.tokens) :], row_positions


def mask_rows(attention: Attention, visible_mask: torch.Tensor | None) -> Attention:
    """Limits attention to those rows that each query may see, bool (H, n, rows); None: all."""
    if visible_mask is None:
        return attention
    hidden_mask = hiding_mask(visible_mask, attention.q)
    return replace(
        attention, mask=hidden_mask if attention.mask is None else hidden_mask + attention.mask
    )


def hiding_mask(visible_mask: torch.Tensor, like_tensor: torch.Tensor) -> torch.Tensor:
    """The additive mask that hides the other rows, of the number format of `like_tensor`."""
    hidden_mask = torch.zeros(
        visible_mask.shape, dtype=like_tensor.dtype, device=like_tensor.device
    )
    return hidden_mask.masked_fill(~visible_mask, -torch.inf)
