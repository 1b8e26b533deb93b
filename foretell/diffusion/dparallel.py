"""Commits every position whose distribution is certain enough.

All positions of the block with an entropy of at most `bound` nats are committed together, and the
one of least entropy in any case. It is made for models that were trained to be certain of many
tokens at once (`foretell train dlm --objective certainty`), and runs on any.

Paper: Chen et al., dParallel: Learnable Parallel Decoding for dLLMs, arXiv:2509.26488
Guarantee: lossy: tokens that are committed together are drawn apart from each other
Cost: target 1
Needs: a model that fills canvases
Trains: the model: foretell train dlm --objective certainty
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
class Dparallel(Denoising):
    """Commits one token a step with `bound` 0, and others without any entropy."""

    block: int = -1  # positions filled before later ones; 0: all; -1: the model's, else 32
    bound: Annotated[float, Range(0)] = 0.5  # nats

    def choose_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> Sequence[int]:
        entropies = proposals.token_entropies()
        ranking = rank_positions(-entropies)
        return [ranking[0], *(index for index in ranking[1:] if entropies[index] <= self.bound)]
