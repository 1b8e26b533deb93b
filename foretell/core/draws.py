"""Tokens drawn from distributions by given uniform numbers, one by one or all of a tree at once.

They are the same tokens either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.native import rows as native
from foretell.ops.logits import best_token_ids, reads_in_library

if TYPE_CHECKING:
    from foretell.core.distribution import Target


def lies_off_cpu(rows: torch.Tensor) -> bool:
    """Whether they lie on another device, where every answer must be waited for: there drawing all
    at once is faster than drawing some in turn.
    """
    return rows.device.type != "cpu"


def draw_token(p: torch.Tensor, u: float) -> int:
    """The token at `u`, in [0, 1), of the distribution p (V,)."""
    if reads_in_library(p[None]):
        token = native.draw_token(p, u)
        if token >= 0:
            return token
    sums = p.cumsum(0, dtype=torch.float64)
    token = int(torch.searchsorted(sums, u * float(sums[-1]), right=True))
    if token == len(p):  # the product was rounded up to the total
        token = int(p.nonzero()[-1])
    return token


def draw_by_uniforms(laws: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """The tokens at these numbers, one for each of the distributions (N, V), with one transfer each
    way.

    -1 where a distribution holds NaN.
    """
    sums = laws.cumsum(-1, dtype=torch.float64)
    u = torch.tensor(uniforms, dtype=torch.float64).to(laws.device)
    tokens = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True)[:, 0]
    token_ids = torch.arange(laws.shape[-1], device=laws.device)
    last_possible = torch.where(laws != 0, token_ids, 0).amax(-1)  # see draw
    tokens = tokens.minimum(last_possible)
    drawn_tokens: list[int] = torch.where(sums[:, -1].isfinite(), tokens, -1).tolist()
    return drawn_tokens


def draw_evenly(door: Any, size: int, purpose: str, position: int, index: int = 0) -> int:
    """A number below `size`, all of them equally likely, without their distribution where the door
    has uniform numbers.
    """
    uniform = getattr(door, "uniform", None)
    if uniform is not None:
        return min(size - 1, int(uniform(purpose, position, index) * size))
    even_probs = torch.full((size,), 1 / size, dtype=torch.float64)
    return int(door.sample(even_probs, purpose, position, index))


def draw_ahead(
    target: Target, door: object, position: int, depths: Sequence[int]
) -> list[int] | None:
    """The tokens after all nodes of a tree, where finding all at once is faster; None: they are to
    be found one by one, as they are needed. -1 stands for a node that has no distribution.

    `position`: tokens generated so far; `depths`: of the nodes. A door without uniform numbers (the
    one that enumerates all outcomes) is asked only for what is needed.
    """
    sampler = target.sampler
    uniform = getattr(door, "uniform", None)
    if sampler.plain and sampler.greedy:
        return best_token_ids(target.rows)
    if sampler.plain and uniform is not None and lies_off_cpu(target.rows):
        return draw_by_uniforms(
            sampler.laws(target.rows), [uniform("target", position + d) for d in depths]
        )
    return None
