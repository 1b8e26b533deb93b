"""Rows that leave a cache and are held beside it: what policies are made of that store older rows
in a form of their own, or read only a part of them.

    rows   0 .. first-1 | held, in blocks | the last ones, at least `recent`
           in the cache | by the policy   | in the cache

Blocks leave at lengths that committed tokens alone decide. What is held is never changed in place,
so forks share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.kv.base import CachePolicy
from foretell.ops.attention import Attention, merge_parts

Layers = list[Any]  # of each layer (KV, n, D), None where it keeps no rows
Part = tuple[torch.Tensor, torch.Tensor]  # see ops.attention.merge


@dataclass
class Holding(CachePolicy):
    """Takes blocks of `block` rows out of its cache, after the `first_rows` and before the
    `recent`.

    `whole`: a prompt is read as a whole before anything leaves. Else blocks leave as soon as they
    can, and the prompt is read over what is held.
    """

    first_rows: int
    recent: int
    block: int
    whole: bool = True

    plain = False

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.clear_held()

    def room_left(self, length: int) -> int:
        if self.whole and length < self.prompt:
            return self.prompt - length
        return self.room_behind(length)

    def room_behind(self, rows: int) -> int:
        """Tokens until the next block leaves, of a text with so many rows, those that are held
        included.
        """
        rows_beyond = rows - self.first_rows - self.recent
        return self.block - (rows_beyond % self.block if rows_beyond > 0 else rows_beyond)

    def change_rows(self, cache: Any) -> None:
        block_count = (cache.base - self.first_rows - self.recent) // self.block
        if block_count > 0 and (cache.length >= self.prompt or not self.whole):
            self.hold_rows(*cache.give_rows(block_count * self.block, self.first_rows))

    def watches_job(self, job: Any) -> bool:
        return self.holds_rows

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        return merge_parts([attention.part(), *self.attend_held(job, attention)]).to(
            attention.q.dtype
        )

    # --- what a policy decides

    @property
    def holds_rows(self) -> bool:
        """Whether it holds any rows."""
        raise NotImplementedError

    def clear_held(self) -> None:
        """Holds nothing from now on."""
        raise NotImplementedError

    def hold_rows(self, keys: Layers, values: Layers) -> None:
        """Takes whole blocks of rows, which follow those that it holds already."""
        raise NotImplementedError

    def attend_held(self, job: Any, attention: Attention) -> Sequence[Part]:
        """The attention of a job's nodes over what is held, in one part or more."""
        raise NotImplementedError
