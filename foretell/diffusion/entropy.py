"""Commits tokens where the model's distribution has the least entropy.

Positions are ranked by the entropy of their distribution; which token is committed there is drawn
afterwards.

Paper: Ye et al., Dream 7B: Diffusion Large Language Models, arXiv:2508.15487, section 3.4
Guarantee: lossy: with one token a step, of a model whose conditionals are exact, it is exact
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- entropies are those of the model's own rows, before temperature and filters
- how many tokens a step commits is shared out evenly among the steps (that of `confidence`), and
not by a clock that leaves the first step without any
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.diffusion.loop import Ordered, Proposals

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Entropy(Ordered):
    """A block of 0 is the whole canvas."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    steps: int = 0  # forwards in all, shared among the blocks; 0: one for each token

    def rank_proposals(self, proposals: Proposals) -> torch.Tensor:
        return -proposals.token_entropies()
