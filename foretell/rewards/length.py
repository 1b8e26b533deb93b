"""How near a text's length comes to a given number of words.

1 at `target` words, falling evenly to 0 at none and at twice as many.

Paper: Huang et al., DeAL: Decoding-time Alignment for Large Language Models, arXiv:2402.06147
Guarantee: lossy: a text that is chosen by it has another law than a sample
Cost: none
Needs: nothing
Trains: nothing
Differs:
- the form is ours, the paper gives none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.errors import BadConfig
from foretell.rewards.base import Reward


@dataclass(frozen=True)
class Length(Reward):
    """A count of words."""

    target: int = 100  # words of a text that has 1

    def __post_init__(self) -> None:
        if not 1 <= self.target <= 1_000_000:
            raise BadConfig.field("length:target", self.target, "between 1 and 1000000")

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [max(0.0, 1 - abs(len(text.split()) - self.target) / self.target) for text in texts]
