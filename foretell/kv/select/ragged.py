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
from foretell.ops.attention import Attention, merge
from foretell.ops.row_attention import attend_all


class Held(NamedTuple):
    """Rows of some key heads of one layer."""

    keys: torch.Tensor  # (KV, n, D)
    values: torch.Tensor

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are read."""
        return self.keys, self.values


@dataclass
class Ragged(Holding):
    """`streaming`, bool (L, KV): the heads that see the `first` rows and the `recent` last ones,
    their own included. The rows that lie between leave the cache, by blocks.
    """

    streaming: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    held: Mapping[int, Any] = field(default_factory=dict)  # of each layer its other heads' rows
    near: tuple[Any, torch.Tensor] | None = None  # of the last job, see `_near`
    # What `shown` made in the layers of the last job: of heads that stream alike, by what mask.
    masks: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = field(default_factory=dict)

    @property
    def leaves(self) -> bool:
        """Whether rows leave the cache."""
        return bool(self.streaming.any())

    def last(self, length: int) -> int:
        """The last rows that streaming heads see of a text behind so many tokens."""
        return self.recent

    def complete(self, length: int) -> bool:
        """Whether all heads see all rows behind so many tokens."""
        return not self.leaves or length < self.first + self.last(length)

    def clear(self) -> None:
        self.held, self.near, self.masks = {}, None, {}

    @property
    def holds(self) -> bool:
        return bool(self.held)

    def room(self, length: int) -> int:
        if not self.leaves:
            return NEVER
        # Forwards end where streaming heads begin to miss rows: all nodes are watched, or none.
        beyond = length - self.first - self.last(length)
        return -beyond if beyond < 0 else self.block - beyond % self.block

    def change(self, cache: Any) -> None:
        blocks = (cache.base - self.first - self.last(cache.length)) // self.block
        if self.leaves and blocks > 0:
            self.hold(*cache.give(blocks * self.block, self.first))

    def watches(self, job: Any) -> bool:
        return not self.complete(job.cache.length)

    def hold(self, keys: Layers, values: Layers) -> None:
        held = dict(self.held)
        for layer, streaming in enumerate(self.streaming):
            if not bool(streaming.all()):
                own = ~streaming
                held[layer] = self.joined(held.get(layer), keys[layer][own], values[layer][own])
        self.held = held

    def joined(self, held: Any, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """What is held of a layer, None or what was made here before, with more rows behind it."""
        if held is None:
            return Held(keys, values)
        return Held(torch.cat([held.keys, keys], 1), torch.cat([held.values, values], 1))

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        own = self.shown(job, asked)
        parts = self.parts(job, asked)
        return merge([own.part(), *parts]).to(asked.q.dtype) if parts else attend_all(own)

    def shown(self, job: Any, asked: Attention) -> Attention:
        """The same over those rows of the cache alone that each query may see."""
        self._near(job)  # with another job, masks are made anew
        alike = tuple(self.streaming[asked.layer].tolist()), asked.q.dtype
        known = self.masks.get(alike)
        if known is None or known[0] is not asked.mask:
            known = self.masks[alike] = asked.mask, masked(asked, self.seen(job, asked)).mask
        return replace(asked, mask=known[1])

    def seen(self, job: Any, asked: Attention) -> torch.Tensor | None:
        """Which rows of the cache each query may see, of those that its mask shows it, bool
        (H, n, rows); None: all.
        """
        streaming = self.streaming[asked.layer]
        near = self._near(job)
        if not bool(streaming.any()) or bool(near.all()):
            return None
        seen: torch.Tensor = near | ~streaming[:, None, None].to(near.device)
        return seen.repeat_interleave(len(asked.q) // len(seen), 0)

    def _near(self, job: Any) -> torch.Tensor:
        """Which rows of the cache streaming heads see, bool (n, rows). Layers share it."""
        cache = job.cache
        known_by = (cache.length, cache.base, len(job.tokens), tuple(job.scratch_positions))
        if self.near is None or self.near[0] != known_by:
            here, columns = places(job)
            last = self.last(cache.length)
            near = (columns < self.first) | (here[:, None] - columns < last)
            self.near, self.masks = (known_by, near), {}
        return self.near[1]

    def parts(self, job: Any, asked: Attention) -> list[Part]:
        held = self.held.get(asked.layer)
        if held is None:
            return []
        others = self.others(asked)
        q = asked.q[others]
        keys, values = held.rows()
        part = replace(asked, q=q).over(keys, values, self.held_mask(job, asked, q))
        if bool(others.all()):
            return [part]
        out = part[0].new_zeros(part[0].shape[0], len(asked.q), part[0].shape[-1])
        log_sum = part[1].new_full(out.shape[:2], -torch.inf)
        out[:, others], log_sum[:, others] = part
        return [(out, log_sum)]

    def held_mask(self, job: Any, asked: Attention, q: torch.Tensor) -> torch.Tensor | None:
        """Additive, of queries (H, n, D) that read held rows (H, n, held); None: they read all."""
        return None

    def others(self, asked: Attention) -> torch.Tensor:
        """The query heads of a layer that see all, bool (H,)."""
        streaming = self.streaming[asked.layer].to(asked.q.device)
        return ~streaming.repeat_interleave(len(asked.q) // len(streaming))

    @property
    def bytes(self) -> int:
        """Of all that is held beside the cache."""
        return bytes_of(part for rows in self.held.values() for part in rows)


def places(job: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a job's new nodes (n,) and of all rows that they stand behind or are (rows,), their
    positions in the text.
    """
    cache = job.cache
    columns = torch.tensor([*cache.row_positions(), *job.scratch_positions], device=cache.device)
    return columns[len(columns) - len(job.tokens) :], columns


def masked(asked: Attention, seen: torch.Tensor | None) -> Attention:
    """The same over those rows alone that each query may see, bool (H, n, rows); None: all."""
    if seen is None:
        return asked
    hidden = hiding(seen, asked.q)
    return replace(asked, mask=hidden if asked.mask is None else hidden + asked.mask)


def hiding(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The additive mask that hides the other rows, of the number format of `like`."""
    hidden = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
    return hidden.masked_fill(~seen, -torch.inf)
