"""Commits every token that the model is sure enough of.

All proposals of the block whose chance is at least `tau` are committed together, and the surest one
in any case.

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
from typing import Any

from foretell.core.masked_text import Sheet
from foretell.diffusion.loop import Denoising, Proposals, rank_positions
from foretell.errors import BadConfig


@dataclass(frozen=True)
class Threshold(Denoising):
    """Above 1, `tau` is one token a step."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    tau: float = 0.9  # chance of a token

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tau <= 2:
            raise BadConfig.field("threshold:tau", self.tau, "between 0 and 1, or above 1: never")

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        probabilities = proposals.token_probs()
        ranking = rank_positions(probabilities)
        return [ranking[0], *(index for index in ranking[1:] if probabilities[index] >= self.tau)]
