"""Rows of a prompt that tokens vote for: its own last ones, as in SnapKV, or any after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.kv.base import NEVER, Attended, CachePolicy, top_rows
from foretell.ops.attention import Attention
from foretell.ops.row_attention import attend_noting

if TYPE_CHECKING:
    from foretell.core.model import Model

POOLS = ("max", "mean")


@dataclass
class Voted(Attended):
    """Keeps `budget` rows of a longer prompt: its last `window` tokens, and of the others those
    that got the most of their attention, smoothed over `kernel` neighbours. `pool`: max or mean.
    """

    window: int = 1
    kernel: int = 1
    pool: str = "max"

    @property
    def first_eviction(self) -> int:
        return self.prompt if self.prompt > self.budget else NEVER

    def counts_token(self, token_position: int) -> bool:
        return self.first_eviction - self.window <= token_position < self.first_eviction

    def room_left(self, length: int) -> int:
        window_start = self.first_eviction - self.window
        return window_start - length if length < window_start else super().room_left(length)

    def smooth_votes(self, received: torch.Tensor) -> torch.Tensor:
        """Smoothed votes for the rows before the window, by what rows received (KV, rows)."""
        votes = received[:, None, : received.shape[1] - self.window]
        half_kernel = self.kernel // 2
        if self.pool == "max":
            pooled_votes = torch.nn.functional.max_pool1d(votes, self.kernel, 1, half_kernel)
        else:
            pooled_votes = torch.nn.functional.avg_pool1d(votes, self.kernel, 1, half_kernel)
        return pooled_votes[:, 0]

    def choose_rows(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        heads, row_count = received.shape
        voted_rows = top_rows(self.smooth_votes(received), self.budget - self.window)
        window_rows = torch.arange(row_count - self.window, row_count, device=received.device)
        return torch.cat([voted_rows, window_rows.expand(heads, -1)], 1)


@dataclass
class Polled(CachePolicy):
    """Adds up what the first `rows` rows get of the nodes of a forward: all that a node gives to
    them is one vote. `votes`: of each layer (KV, rows), in float32 or wider.
    """

    rows: int
    votes: dict[int, torch.Tensor] = field(default_factory=dict)

    def watches_job(self, job: Any) -> bool:
        return True

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        node_outputs, given_scores = attend_noting(attention)
        given_scores = given_scores[..., : self.rows]
        smallest_total = torch.finfo(given_scores.dtype).tiny
        self.votes[attention.layer] = (
            given_scores / given_scores.sum(-1, keepdim=True).clamp_min(smallest_total)
        ).sum(1)
        return node_outputs


@torch.inference_mode()
def poll_rows(
    model: Model, cache: Any, tokens: Sequence[int], voted_rows: int | None = None
) -> dict[int, torch.Tensor]:
    """Polls what the rows of a cache of this model would get, if these were the next tokens: see
    Polled.

    `voted_rows`: the first ones, which get votes; None: those of the committed text, so that what
    the tokens give to each other is no part of their votes. One forward over scratch rows, which
    are forgotten: the cache is what it was.
    """
    assert not cache.tokens, "a cache is asked between forwards"
    poll_policy = Polled(cache.base if voted_rows is None else voted_rows)
    saved_state = cache.policy, cache.changes_at, cache.synced
    cache.policy, cache.changes_at = poll_policy, NEVER
    text_tokens = [*[0] * cache.length, *tokens]  # of those that it has taken in none is read
    try:
        scratch_ask = Ask(TokenTree(tokens[-1]), rows=())
        job, _ = cache.prepare(scratch_ask, text_tokens, len(tokens))
        model.forward([job])
    finally:
        cache.commit(())
        cache.policy, cache.changes_at, cache.synced = saved_state
    return poll_policy.votes
