"""How near a text's length comes to a given number of words.

1 at `target` words, falling evenly to 0 at none and at twice as many.

Paper: Huang et al., DeAL: Decoding-time Alignment for Large Language Models, arXiv:2402.06147
Guarantee: lossy: a text that is chosen by it has another distribution than a sample
Cost: none
Needs: nothing
Trains: nothing
Differs:
- the form is ours, the paper gives none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.rewards.base import Reward


@dataclass(frozen=True)
class Length(Reward):
    """A count of words."""

    target: Annotated[int, Range(1, 1000000)] = 100  # words of a text that has 1

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [max(0.0, 1 - abs(len(text.split()) - self.target) / self.target) for text in texts]
