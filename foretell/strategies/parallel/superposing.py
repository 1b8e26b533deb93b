"""Drafts that share one stream of rows: how they are scored, and what their common input is."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Reply

if TYPE_CHECKING:
    from foretell.core.context import Context

WEIGHTS = np.array([0.01, 0.04, 0.15, 0.18, 0.12])  # of the contexts of 1, 2, ... tokens
PENALTY = 200.0  # of a draft none of whose continuations was ever counted


class Draft(NamedTuple):
    """`score`: the sum of its tokens' log scores."""

    score: float
    tokens: list[int]


def best_candidates(
    scores: torch.Tensor, token_count: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """The `token_count` best tokens of scores (V,), ties to the lowest id, and their
    log-probabilities among themselves.
    """
    lowest_score = scores.topk(min(token_count, len(scores))).values[-1]
    token_ids = ((scores >= lowest_score) & (scores > -torch.inf)).nonzero()[:, 0]
    best_order = scores[token_ids].argsort(descending=True, stable=True)[:token_count]
    log_probs = (scores[token_ids[best_order]].cpu().double() / temperature).log_softmax(-1)
    return token_ids[best_order].cpu().numpy(), log_probs.numpy()


def mixed_scores(
    log_probs: np.ndarray, hits: np.ndarray, totals: np.ndarray, alpha: float, backoff: bool
) -> np.ndarray:
    """Log scores (m,): the model's log-probabilities logs (m,) and the counts' distribution, mixed
    geometrically, the latter with the weight `alpha`. `backoff`: what the weights leave of 1 is the
    model's own distribution in that of the counts.
    """
    known_weights = WEIGHTS * (totals > 0)
    count_probs = known_weights @ (hits / np.maximum(totals, 1)[:, None])
    if not (backoff or count_probs.any()):
        return (1 - alpha) * log_probs - PENALTY
    with np.errstate(divide="ignore"):
        count_log_probs = np.log(count_probs)
    if backoff:
        count_log_probs = np.logaddexp(count_log_probs, np.log1p(-known_weights.sum()) + log_probs)
    return np.asarray((1 - alpha) * log_probs + alpha * count_log_probs)


def mixing_weights(drafts: Sequence[Draft]) -> dict[int, float]:
    """Newest token -> its weight in the next input: the softmax of the drafts' scores; of equal
    tokens the sum.
    """
    token_shares: dict[int, float] = {}
    for draft in drafts:
        token = draft.tokens[-1]
        token_shares[token] = token_shares.get(token, 0.0) + math.exp(draft.score - drafts[0].score)
    share_sum = sum(token_shares.values())
    return {token: share / share_sum for token, share in token_shares.items()}


def superpose_states(states: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(n, E) -> (1, E), the weighted sum, computed in at least float32."""
    wide_states = states.to(torch.promote_types(states.dtype, torch.float32))
    mixed_state = (wide_states * wide_states.new_tensor(weights)[:, None]).sum(0, keepdim=True)
    return mixed_state.to(states.dtype)


def nucleus_probs(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """The distribution (V,) of the likeliest tokens of scores (V,) that have this much probability
    together.

    Source: Holtzman et al., arXiv 1904.09751, section 3.1.
    """
    token_probs = scores.softmax(-1)
    sorted_probs, token_order = token_probs.sort(descending=True, stable=True)
    left_out = token_order[sorted_probs.cumsum(-1) - sorted_probs >= mass]
    token_probs[left_out] = 0
    return token_probs / token_probs.sum()


def draw_opening(ctx: Context, length: int, mass: float) -> Generator[Message, Any, list[int]]:
    """Draws the text's next tokens by nucleus sampling, `length` or up to its end."""
    tokens: list[int] = []
    tree = TokenTree(ctx.tokens[-1])
    for position in range(length):
        reply: Reply = yield Ask(tree, branch=ctx.branch, rows=[position])
        token_probs = nucleus_probs(ctx.sampler.scores(reply.logits[0], tokens), mass)
        tokens.append(ctx.rng.sample(token_probs, "target", position))
        if ctx.sampler.is_ended(tokens):
            break
        tree.add(position, tokens[-1])
    return tokens
