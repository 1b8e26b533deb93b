"""Commits every token that the model is sure enough of.

All proposals of the block whose probability is at least `tau` are committed together, and the
surest one in any case.

Paper: Wu et al., Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and
Parallel Decoding, arXiv:2505.22618, section 3.3
Guarantee: lossy: tokens that are committed together are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- a proposal is never the mask itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from foretell.core.masked_text import Sheet
from foretell.core.settings import Range
from foretell.diffusion.loop import Denoising, Proposals, rank_positions


@dataclass(frozen=True)
class Threshold(Denoising):
    """Above 1, `tau` is one token a step."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    tau: Annotated[float, Range(0, 2)] = 0.9  # probability of a token

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        probabilities = proposals.token_probs()
        ranking = rank_positions(probabilities)
        return [ranking[0], *(index for index in ranking[1:] if probabilities[index] >= self.tau)]
