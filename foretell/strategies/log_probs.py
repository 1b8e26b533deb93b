"""Log-probabilities after a text, for searches that compare paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from foretell.core.context import Context


def log_probs(ctx: Context, row: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
    """Log-probabilities (V,) of the token after `output`, by the target's row there."""
    scores = ctx.sampler.scores(row, output)
    if not float(scores.max()) > -torch.inf:
        raise ctx.sampler.fault(scores, row)
    return scores.log_softmax(-1)
