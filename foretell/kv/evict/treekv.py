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
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV, Attended, check_budget, check_every
from foretell.kv.slots import Slots, turning

if TYPE_CHECKING:
    from foretell.core.model import Model

POSITIONS = ("slots", "text")


@dataclass(frozen=True)
class Treekv(KV):
    """Counts of rows and tokens."""

    role = "evictor"

    budget: int = 1024  # rows of a layer's head
    sinks: int = 4  # of them for the first tokens
    recent: int = 0  # of them for the last ones; 0: half of the budget, less the sinks
    every: int = 1  # tokens between two evictions
    block: int = 32  # tokens of a prompt that stay or go together; at most the rows of the tree
    positions: str = "slots"  # rows stand at their places in the cache; or text: of their tokens

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise BadConfig.field("treekv:sinks", self.sinks, "at least 0")
        if self.recent < 0:
            raise BadConfig.field("treekv:recent", self.recent, "at least 0")
        least = self.sinks + max(1, self.recent) + 1
        check_budget("treekv", self.budget, least, "sinks, recent and other rows")
        check_every("treekv", self.every)
        if self.block < 1:
            raise BadConfig.field("treekv:block", self.block, "at least 1 token")
        if self.positions not in POSITIONS:
            raise BadConfig.field("treekv:positions", self.positions, " or ".join(POSITIONS))

    def policy(self, target: Model) -> Tree:
        self.fits(target)
        recent = self.recent or max(1, self.budget // 2 - self.sinks)
        slots = None
        if self.positions == "slots":
            slots = Slots(turning("treekv", target), still=self.sinks)
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
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.pointer, self.kept = 0, {}
        self.slots = None if self.slots is None else self.slots.empty()

    @property
    def size(self) -> int:
        """Rows of the tree."""
        return self.budget - self.sinks - self.recent

    @property
    def watched(self) -> int:
        """The place of the first token that rows are judged by."""
        return max(0, self.prompt - self.block)

    def counts(self, place: int) -> bool:
        return place >= self.watched

    def room(self, length: int) -> int:
        return self.watched - length if length < self.watched else super().room(length)

    def evict(self, cache: Any) -> None:
        # All layers at once: their heads have as many rows.
        heads = [len(part) for part in self.received.values()]
        received = torch.cat([*self.received.values()])
        places = self._places(cache, len(received), received.device)
        means = received / (cache.length - places.clamp(min=self.watched))
        tree = means[:, self.sinks : cache.base - self.recent]
        if cache.length == self.prompt:
            left = by_blocks(tree, self.size, self.block)
        else:
            left = survivors(tree, self.size, self.pointer)
            self.pointer = (self.pointer + tree.shape[1] - self.size) % self.size
        rows = torch.arange(cache.base, device=received.device).expand(len(received), -1)
        last = rows[:, cache.base - self.recent :]
        stay = torch.cat([rows[:, : self.sinks], left + self.sinks, last], 1)
        self.received = dict(zip(self.received, received.gather(1, stay).split(heads), strict=True))
        self.kept = dict(zip(self.received, places.gather(1, stay).split(heads), strict=True))
        chosen = dict(zip(self.received, stay.split(heads), strict=True))
        in_order = [chosen[layer] for layer in range(len(cache.layout))]
        if self.slots is None:
            cache.keep_rows(in_order)
        else:
            self.slots = self.slots.keep(cache, in_order)

    def _places(self, cache: Any, heads: int, device: torch.device) -> torch.Tensor:
        """Of all heads' rows (heads, base), where their tokens stand in the text."""
        if not self.kept:
            return torch.arange(cache.base, device=device).expand(heads, -1)
        known = torch.cat([self.kept[layer] for layer in self.received])
        new = torch.arange(cache.length - cache.base + known.shape[1], cache.length, device=device)
        return torch.cat([known, new.expand(heads, -1)], 1)


def survivors(means: torch.Tensor, size: int, pointer: int) -> torch.Tensor:
    """Which of the rows with these means (heads, n) are left, (heads, size), where the first `size`
    are there and the others come in one by one (Algorithm 1).

    Of equal neighbours the earlier goes.
    """
    heads, rows = means.shape
    left = torch.arange(size, device=means.device).expand(heads, -1)
    places = torch.arange(size, device=means.device)
    for row in range(size, rows):
        left = torch.cat([left, left.new_full((heads, 1), row)], 1)
        first, second = means.gather(1, left[:, pointer : pointer + 2]).unbind(1)
        goes = pointer + (first > second).long()
        left = left.gather(1, places + (places >= goes[:, None]))
        pointer = (pointer + 1) % size
    return left


def by_blocks(means: torch.Tensor, size: int, block: int) -> torch.Tensor:
    """The same of a prompt's rows: whole blocks are compared, by the means of their rows."""
    heads, rows = means.shape
    whole = (rows - size % block) // block
    blocks = means[:, : whole * block].unflatten(1, (whole, block)).mean(2)
    stay = survivors(blocks, size // block, 0)
    inside = torch.arange(block, device=means.device)
    in_blocks = (stay[..., None] * block + inside).flatten(1)
    rest = torch.arange(whole * block, rows, device=means.device).expand(heads, -1)
    left = torch.cat([in_blocks, rest], 1)
    # Fewer than a block too many, so that the pointer does not leave the two oldest.
    return left.gather(1, survivors(means.gather(1, left), size, 0))
