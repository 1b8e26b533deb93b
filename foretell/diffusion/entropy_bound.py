"""Commits positions while what they may know of each other is little.

In order of entropy, positions are committed while the sum of their entropies less the largest one
is at most `gamma`: that bounds what is lost by drawing them apart from each other.

Paper: Ben-Hamu et al., Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking, arXiv:2505.24857
Guarantee: lossy: tokens that are committed together are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases
Trains: nothing
Differs:
- entropies are those of the model's own rows, before temperature and filters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from foretell.core.masked_text import Sheet
from foretell.core.settings import Range
from foretell.diffusion.loop import Denoising, Proposals, rank_positions


@dataclass(frozen=True)
class EntropyBound(Denoising):
    """Commits one token a step with `gamma` 0, and others without any entropy."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    gamma: Annotated[float, Range(0)] = 0.1  # nats

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        entropies = proposals.token_entropies()
        ranking = rank_positions(-entropies)
        entropy_sum = 0.0  # of those that are committed already, all of them at most as large
        count = 1
        while count < len(ranking):
            entropy_sum += float(entropies[ranking[count - 1]])
            if entropy_sum > self.gamma:
                break
            count += 1
        return ranking[:count]
