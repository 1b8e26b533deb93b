"""Keeps of a prompt what the tokens that follow it are likely to attend to.

Which tokens these will be is not known, but where they will stand is, and queries are alike by
their positions far more than by what they say. So `pseudo` tokens are put after the prompt, the
first and the last ones of the prompt once more, at the positions of the answer. What the prompt's
rows get of their queries decides which rows stay. Then the pseudo tokens vanish: the answer begins
where they began, and no row of them is left.

Paper: Tian et al., Where Matters More Than What: Decoding-aligned KV Cache Compression via
Position-aware Pseudo Queries, arXiv:2603.11564
Guarantee: lossy: rows of the prompt are given up; with drafts the text is the one without them
Cost: target 1 + one forward of `pseudo` tokens after a prompt that is longer than the budget
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- how votes are added and smoothed is unpublished: each pseudo token has one vote a head, divided by
what it gives to the prompt's rows, and the mean is taken over `kernel` neighbours
- the last `window` tokens stay; whether the paper keeps any is unpublished
- query heads that share a key head vote by their mean, and share its rows
- the pseudo tokens run in a forward of their own, as rows change when the prompt is complete; its
time is part of the first token's, and no statistic counts it
- near the end of the context there are as many pseudo tokens as it has positions for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from foretell.core.settings import Odd, OneOf, Range
from foretell.kv.base import KV, check_budget
from foretell.kv.voting import POOLS, Voted, poll_rows

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Dapq(KV):
    """Counts of rows and tokens."""

    budget: int = 1024  # rows of a layer's head that stay of the prompt
    pseudo: Annotated[int, Range(1)] = 32  # tokens after the prompt, which vote; 32 to 64 do best
    window: Annotated[int, Range(0)] = 8  # last tokens of the prompt, which stay
    kernel: Annotated[int, Odd(1)] = 7  # neighbours that a vote is smoothed over
    pool: Annotated[str, OneOf(POOLS)] = "mean"  # or max

    def __post_init__(self) -> None:
        super().__post_init__()
        reserved_rows = f"a window of {self.window} and a row beside it"
        check_budget("dapq", self.budget, self.window + 1, reserved_rows)

    def build_policy(self, target: Model) -> Aligned:
        self.check_target(target)
        return Aligned(
            self.budget,
            every=0,
            window=self.window,
            kernel=self.kernel,
            pool=self.pool,
            target=target,
            pseudo=self.pseudo,
        )


@dataclass
class Aligned(Voted):
    """`first_ids` and `last_ids`: the first and the last ids of the prompt, from which pseudo
    tokens are made.
    """

    target: Any = None
    pseudo: int = 0
    first_ids: tuple[int, ...] = ()
    last_ids: tuple[int, ...] = ()

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.first_ids = self.last_ids = ()

    def counts_token(self, token_position: int) -> bool:
        """No token of the text votes."""
        return False

    def room_left(self, length: int) -> int:
        return (
            self.first_eviction - length
            if length < self.first_eviction
            else super().room_left(length)
        )

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep_nodes(cache, nodes)
        if cache.length < self.prompt:
            first_count = self.pseudo // 2
            node_ids = [cache.tokens[node] for node in nodes]
            self.first_ids = (*self.first_ids, *node_ids)[:first_count]
            self.last_ids = (*self.last_ids, *node_ids)[first_count - self.pseudo :]

    def evict_rows(self, cache: Any) -> None:
        remaining_positions = self.target.context - cache.length
        self.received = poll_rows(
            self.target, cache, (*self.first_ids, *self.last_ids)[:remaining_positions]
        )
        super().evict_rows(cache)
        self.received = {}
