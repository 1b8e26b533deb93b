"""Tokens drawn from laws by given uniform numbers, one by one or all of a tree at once: the same
tokens either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foretell.ops.rows import firsts

if TYPE_CHECKING:
    from foretell.core.rng import Door
    from foretell.core.sampling import Target


def apart(rows: torch.Tensor) -> bool:
    """Whether they lie on a device whose every answer is waited for: there all at once is quicker
    than some in turn.
    """
    return rows.device.type != "cpu"


def draw(p: torch.Tensor, u: float) -> int:
    """The token at `u`, in [0, 1), of the law p (V,)."""
    sums = p.cumsum(0, dtype=torch.float64)
    token = int(torch.searchsorted(sums, u * float(sums[-1]), right=True))
    # The product can round up to the total; then the last token of positive probability is meant.
    return token if token < len(p) else int(p.nonzero()[-1])


def draws(laws: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """The tokens at these numbers, one for each of the laws (N, V), with one transfer each way.

    -1 where a law holds NaN.
    """
    sums = laws.cumsum(-1, dtype=torch.float64)
    u = torch.tensor(uniforms, dtype=torch.float64).to(laws.device)[:, None] * sums[:, -1:]
    tokens = torch.searchsorted(sums, u, right=True)[:, 0]
    places = torch.arange(laws.shape[-1], device=laws.device)
    tokens = tokens.minimum(torch.where(laws != 0, places, 0).amax(-1))
    chosen: list[int] = torch.where(sums[:, -1].isfinite(), tokens, -1).tolist()
    return chosen


def ahead(target: Target, door: Door, position: int, depths: Sequence[int]) -> list[int] | None:
    """The tokens after all nodes of a tree, where they are found sooner together; None: one by one,
    as they are needed. -1 stands for a node that has no law.

    `position`, `depths`: as in verify.walk. The door for every outcome must not be asked for what
    is not needed: its draws are no function of a uniform number.
    """
    sampler, uniform = target.sampler, getattr(door, "uniform", None)
    if sampler.plain and sampler.greedy:
        return firsts(target.rows)
    if sampler.plain and uniform is not None and apart(target.rows):
        return draws(sampler.laws(target.rows), [uniform("target", position + d) for d in depths])
    return None
