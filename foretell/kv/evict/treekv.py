"""Keeps ever fewer rows the older they are, of two neighbours the one that is attended to more.

The first `sinks` and the `recent` last tokens stay. In between, where a row too many has come in, a
pointer names two neighbours; the one with the lower mean attention of all queries that saw it goes,
and the pointer moves on by one row, from the end back to the beginning. So the rows stand like a
tree: sparse far back, dense near the end. Positions count rows, as in StreamingLLM. Of a long
prompt whole blocks stay or go, by the attention of its last block.

Paper: He et al., TreeKV: Smooth Key-Value Cache Compression with Tree Structures, arXiv:2501.04987
Guarantee: lossy: rows are given up; with drafts the text is the one without them
Cost: target 1
Needs: rotary positions (none with `positions=text`), and cache rows of every layer, of all of the
text
Trains: nothing
Differs:
- the paper does not say how long a block is, nor what becomes of a prompt that is no whole number
of them: the rest stays beside them, and as many rows go from the two oldest blocks
- each key head has rows of its own; query heads that share a key head count by their mean
- keys are kept as they were made and turned once in float32; the paper keeps them unturned
- with `every` above 1 so many rows go at once, by the means at that moment, and drafts may be as
long
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import OneOf, Range
from foretell.kv.base import KV, Attended, check_budget
from foretell.kv.slots import Slots, find_turn

if TYPE_CHECKING:
    from foretell.core.model import Model

POSITIONS = ("slots", "text")


@dataclass(frozen=True)
class Treekv(KV):
    """Counts of rows and tokens."""

    role = "evictor"

    budget: int = 1024  # rows of a layer's head
    sinks: Annotated[int, Range(0)] = 4  # of them for the first tokens
    # of them for the last ones; 0: half of the budget, less the sinks
    recent: Annotated[int, Range(0)] = 0
    every: Annotated[int, Range(1)] = 1  # tokens between two evictions
    # tokens of a prompt that stay or go together; at most the rows of the tree
    block: Annotated[int, Range(1)] = 32
    # rows stand at their places in the cache; or text: of their tokens
    positions: Annotated[str, OneOf(POSITIONS)] = "slots"

    def __post_init__(self) -> None:
        super().__post_init__()
        min_rows = self.sinks + max(1, self.recent) + 1
        check_budget("treekv", self.budget, min_rows, "sinks, recent and other rows")

    def build_policy(self, target: Model) -> Tree:
        self.check_target(target)
        recent = self.recent or max(1, self.budget // 2 - self.sinks)
        slots = None
        if self.positions == "slots":
            slots = Slots(find_turn("treekv", target), still=self.sinks)
        block = min(self.block, self.budget - self.sinks - recent)
        return Tree(
            self.budget, self.every, sinks=self.sinks, recent=recent, block=block, slots=slots
        )


@dataclass
class Tree(Attended):
    """`received` is what rows got of all tokens from the prompt's last block on."""

    sinks: int = 0
    recent: int = 1
    block: int = 1
    slots: Slots | None = None  # None: keys stay where they were made
    pointer: int = 0  # the earlier of the two rows of the tree that are compared next
    # Of each layer, the places (KV, kept) in the text of the rows that stayed at the last eviction
    text_positions: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.pointer, self.text_positions = 0, {}
        self.slots = None if self.slots is None else self.slots.without_rows()

    @property
    def tree_size(self) -> int:
        """Rows of the tree."""
        return self.budget - self.sinks - self.recent

    @property
    def first_watched(self) -> int:
        """The place of the first token that rows are judged by."""
        return max(0, self.prompt - self.block)

    def counts_token(self, token_position: int) -> bool:
        return token_position >= self.first_watched

    def room_left(self, length: int) -> int:
        return (
            self.first_watched - length
            if length < self.first_watched
            else super().room_left(length)
        )

    def evict_rows(self, cache: Any) -> None:
        # All layers at once: their heads have as many rows.
        head_counts = [len(part) for part in self.received.values()]
        head_scores = torch.cat([*self.received.values()])
        token_positions = self._token_positions(cache, len(head_scores), head_scores.device)
        mean_scores = head_scores / (cache.length - token_positions.clamp(min=self.first_watched))
        tree_means = mean_scores[:, self.sinks : cache.base - self.recent]
        if cache.length == self.prompt:
            surviving_rows = block_survivors(tree_means, self.tree_size, self.block)
        else:
            surviving_rows = find_survivors(tree_means, self.tree_size, self.pointer)
            self.pointer = (self.pointer + tree_means.shape[1] - self.tree_size) % self.tree_size
        all_rows = torch.arange(cache.base, device=head_scores.device).expand(len(head_scores), -1)
        recent_rows = all_rows[:, cache.base - self.recent :]
        stay_rows = torch.cat(
            [all_rows[:, : self.sinks], surviving_rows + self.sinks, recent_rows], 1
        )
        self.received = dict(
            zip(self.received, head_scores.gather(1, stay_rows).split(head_counts), strict=True)
        )
        self.text_positions = dict(
            zip(self.received, token_positions.gather(1, stay_rows).split(head_counts), strict=True)
        )
        layer_rows = dict(zip(self.received, stay_rows.split(head_counts), strict=True))
        in_order = [layer_rows[layer] for layer in range(len(cache.layout))]
        if self.slots is None:
            cache.keep_rows(in_order)
        else:
            self.slots = self.slots.keep_rows(cache, in_order)

    def _token_positions(self, cache: Any, heads: int, device: torch.device) -> torch.Tensor:
        """Places in the text of the tokens of all heads' rows (heads, base)."""
        if not self.text_positions:
            return torch.arange(cache.base, device=device).expand(heads, -1)
        held_positions = torch.cat([self.text_positions[layer] for layer in self.received])
        new_positions = torch.arange(
            cache.length - cache.base + held_positions.shape[1], cache.length, device=device
        )
        return torch.cat([held_positions, new_positions.expand(heads, -1)], 1)


def find_survivors(mean_scores: torch.Tensor, size: int, pointer: int) -> torch.Tensor:
    """Which of the rows with these means (heads, n) are left, (heads, size), where the first `size`
    are there and the others come in one by one (Algorithm 1).

    The earlier of two equal neighbours goes.
    """
    heads, row_count = mean_scores.shape
    surviving_rows = torch.arange(size, device=mean_scores.device).expand(heads, -1)
    row_indices = torch.arange(size, device=mean_scores.device)
    for row in range(size, row_count):
        surviving_rows = torch.cat([surviving_rows, surviving_rows.new_full((heads, 1), row)], 1)
        first_means, second_means = mean_scores.gather(
            1, surviving_rows[:, pointer : pointer + 2]
        ).unbind(1)
        dropped_index = pointer + (first_means > second_means).long()
        surviving_rows = surviving_rows.gather(
            1, row_indices + (row_indices >= dropped_index[:, None])
        )
        pointer = (pointer + 1) % size
    return surviving_rows


def block_survivors(mean_scores: torch.Tensor, size: int, block: int) -> torch.Tensor:
    """Which rows of a prompt are left: whole blocks are compared, by the means of their rows."""
    heads, row_count = mean_scores.shape
    block_count = (row_count - size % block) // block
    block_means = mean_scores[:, : block_count * block].unflatten(1, (block_count, block)).mean(2)
    kept_blocks = find_survivors(block_means, size // block, 0)
    block_offsets = torch.arange(block, device=mean_scores.device)
    in_blocks = (kept_blocks[..., None] * block + block_offsets).flatten(1)
    rest_rows = torch.arange(block_count * block, row_count, device=mean_scores.device).expand(
        heads, -1
    )
    surviving_rows = torch.cat([in_blocks, rest_rows], 1)
    # Fewer than a block too many, so that the pointer does not leave the two oldest.
    return surviving_rows.gather(1, find_survivors(mean_scores.gather(1, surviving_rows), size, 0))
