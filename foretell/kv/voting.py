"""Rows of a prompt that tokens vote for: its own last ones, as in SnapKV, or any behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig
from foretell.kv.base import NEVER, Attended, CachePolicy, best
from foretell.ops.attention import Attention
from foretell.ops.row_attention import attend_noting

if TYPE_CHECKING:
    from foretell.core.model import Model

POOLS = ("max", "mean")


def check_smoothing(name: str, kernel: int, pool: str) -> None:
    """Raises BadConfig for what votes cannot be smoothed by."""
    if kernel < 1 or kernel % 2 == 0:
        raise BadConfig.field(f"{name}:kernel", kernel, "an odd number, at least 1")
    if pool not in POOLS:
        raise BadConfig.field(f"{name}:pool", pool, " or ".join(POOLS))


@dataclass
class Voted(Attended):
    """Keeps `budget` rows of a longer prompt: its last `window` tokens, and of the others those
    that got the most of their attention, smoothed over `kernel` neighbours. `pool`: max or mean.
    """

    window: int = 1
    kernel: int = 1
    pool: str = "max"

    @property
    def first(self) -> int:
        return self.prompt if self.prompt > self.budget else NEVER

    def counts(self, place: int) -> bool:
        return self.first - self.window <= place < self.first

    def room(self, length: int) -> int:
        begin = self.first - self.window
        return begin - length if length < begin else super().room(length)

    def votes(self, received: torch.Tensor) -> torch.Tensor:
        """Of what rows received (KV, rows), the smoothed votes for those before the window."""
        votes = received[:, None, : received.shape[1] - self.window]
        half = self.kernel // 2
        if self.pool == "max":
            pooled = torch.nn.functional.max_pool1d(votes, self.kernel, 1, half)
        else:
            pooled = torch.nn.functional.avg_pool1d(votes, self.kernel, 1, half)
        return pooled[:, 0]

    def chosen(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        heads, rows = received.shape
        chosen = best(self.votes(received), self.budget - self.window)
        last = torch.arange(rows - self.window, rows, device=received.device)
        return torch.cat([chosen, last.expand(heads, -1)], 1)


@dataclass
class Polled(CachePolicy):
    """Adds up what the first `rows` rows get of the nodes of a forward: all that a node gives to
    them is one vote. `votes`: of each layer (KV, rows), in float32 or wider.
    """

    rows: int
    votes: dict[int, torch.Tensor] = field(default_factory=dict)

    def watches(self, job: Any) -> bool:
        return True

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        out, given = attend_noting(asked)
        given = given[..., : self.rows]
        least = torch.finfo(given.dtype).tiny
        self.votes[asked.layer] = (given / given.sum(-1, keepdim=True).clamp_min(least)).sum(1)
        return out


@torch.inference_mode()
def polled(
    model: Model, cache: Any, tokens: Sequence[int], rows: int | None = None
) -> dict[int, torch.Tensor]:
    """What the rows of a cache of this model would get, if these were the next tokens: see Polled.

    `rows`: the first ones, which get votes; None: those of the committed text, so that
    what the tokens give to each other is no part of their votes. One forward over scratch rows,
    which are forgotten: the cache is what it was.
    """
    assert not cache.tokens, "a cache is asked between forwards"
    poll = Polled(cache.base if rows is None else rows)
    held = cache.policy, cache.changes_at, cache.synced
    cache.policy, cache.changes_at = poll, NEVER
    text = [*[0] * cache.length, *tokens]  # of those that it has taken in none is read
    try:
        ask = Ask(TokenTree(tokens[-1]), rows=())
        job, _ = cache.prepare(ask, text, len(tokens))
        model.forward([job])
    finally:
        cache.commit(())
        cache.policy, cache.changes_at, cache.synced = held
    return poll.votes
