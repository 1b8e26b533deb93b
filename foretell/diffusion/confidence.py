"""Commits the tokens that the model is surest of.

Every forward proposes a token for each masked position of the block; those with the highest
probability are committed, as many as the steps need. Committed tokens stay. With one token a step
and no block this is what the published samplers call low-confidence remasking.

Paper: Nie et al., Large Language Diffusion Models, arXiv:2502.09992, section 2.4
Guarantee: lossy: which position is filled depends on the token that was drawn for it
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- tokens are drawn from the distribution with temperature and filters, by inverse transform in place
of Gumbel noise; probabilities are the model's own, as in the published code
- a proposal is never the mask itself
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.diffusion.loop import Ordered, Proposals

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Confidence(Ordered):
    """A block of 0 is the whole canvas."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    steps: int = 0  # forwards in all, shared among the blocks; 0: one for each token

    def rank_proposals(self, proposals: Proposals) -> torch.Tensor:
        return proposals.token_probs()
