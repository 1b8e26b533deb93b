"""Commits as many sure tokens together as their probabilities bear.

Of the proposals in order of their probabilities, the n surest are committed where the n-th has at
least 1 - f / (n + 1): then the likeliest tokens one by one would be the likeliest ones together.

Paper: Wu et al., Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and
Parallel Decoding, arXiv:2505.22618, section 3.3
Guarantee: lossy: tokens that are committed together are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- the published code commits the last masked token of a block even where it fails by itself; here
only the surest is committed in any case
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from foretell.core.masked_text import Sheet
from foretell.core.settings import Range
from foretell.diffusion.loop import Denoising, Proposals, rank_positions


@dataclass(frozen=True)
class Factor(Denoising):
    """Commits one token a step with `f` 0, and others of chance 1."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    f: Annotated[float, Range(0)] = 1.0

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        probabilities = proposals.token_probs()
        ranking = rank_positions(probabilities)
        count = 1
        while count < len(ranking) and probabilities[ranking[count]] >= 1 - self.f / (count + 2):
            count += 1
        return ranking[:count]
