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


def likeliest(
    scores: torch.Tensor, count: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best tokens of scores (V,), ties to the lowest id, and their log-probabilities
    among themselves.
    """
    least = scores.topk(min(count, len(scores))).values[-1]
    ids = ((scores >= least) & (scores > -torch.inf)).nonzero()[:, 0]
    order = scores[ids].argsort(descending=True, stable=True)[:count]
    logs = (scores[ids[order]].cpu().double() / temperature).log_softmax(-1)
    return ids[order].cpu().numpy(), logs.numpy()


def mixed_scores(
    logs: np.ndarray, hits: np.ndarray, totals: np.ndarray, alpha: float, backoff: bool
) -> np.ndarray:
    """Log scores (m,): the model's log-probabilities logs (m,) and the counts' law, mixed
    geometrically, the latter with the weight `alpha`. `backoff`: what the weights leave of 1 is the
    model's own law in that of the counts.
    """
    known = WEIGHTS * (totals > 0)
    law = known @ (hits / np.maximum(totals, 1)[:, None])
    if not (backoff or law.any()):
        return (1 - alpha) * logs - PENALTY
    with np.errstate(divide="ignore"):
        counted = np.log(law)
    if backoff:
        counted = np.logaddexp(counted, np.log1p(-known.sum()) + logs)
    return np.asarray((1 - alpha) * logs + alpha * counted)


def mixture(drafts: Sequence[Draft]) -> dict[int, float]:
    """Newest token -> its weight in the next input: the softmax of the drafts' scores; of equal
    tokens the sum.
    """
    shares: dict[int, float] = {}
    for draft in drafts:
        token = draft.tokens[-1]
        shares[token] = shares.get(token, 0.0) + math.exp(draft.score - drafts[0].score)
    total = sum(shares.values())
    return {token: share / total for token, share in shares.items()}


def superpose(states: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(n, E) -> (1, E), the weighted sum, computed in at least float32."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    mixed = (wide * wide.new_tensor(weights)[:, None]).sum(0, keepdim=True)
    return mixed.to(states.dtype)


def nucleus(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """The law (V,) of the likeliest tokens of scores (V,) that have this much probability together.

    Source: Holtzman et al., arXiv 1904.09751, section 3.1.
    """
    law = scores.softmax(-1)
    chances, order = law.sort(descending=True, stable=True)
    left_out = order[chances.cumsum(-1) - chances >= mass]
    law[left_out] = 0
    return law / law.sum()


def drawn_opening(ctx: Context, length: int, mass: float) -> Generator[Message, Any, list[int]]:
    """Draws the text's next tokens by nucleus sampling, `length` or up to its end."""
    tokens: list[int] = []
    tree = TokenTree(ctx.tokens[-1])
    for place in range(length):
        reply: Reply = yield Ask(tree, branch=ctx.branch, rows=[place])
        law = nucleus(ctx.sampler.scores(reply.logits[0], tokens), mass)
        tokens.append(ctx.rng.sample(law, "target", place))
        if ctx.sampler.ended(tokens):
            break
        tree.add(place, tokens[-1])
    return tokens
