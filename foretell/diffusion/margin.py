"""Commits tokens where the likeliest is far ahead of the next one.

Positions are ranked by the probability of their likeliest token less that of the second; which is
committed there is drawn afterwards.

Paper: Kim et al., Train for the Worst, Plan for the Best: Understanding Token Ordering in Masked
Diffusions, arXiv:2502.06768
Guarantee: lossy: with one token a step, of a model whose conditionals are exact, it is exact
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- margins are those of the model's own rows, before temperature and filters
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.diffusion.loop import Ordered, Proposals

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Margin(Ordered):
    """A block of 0 is the whole canvas."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    steps: int = 0  # forwards in all, shared among the blocks; 0: one for each token

    def rank_proposals(self, proposals: Proposals) -> torch.Tensor:
        return proposals.token_margins()
