"""A token that would repeat an n-gram of the text meets a resistance, the more the longer it is.

Of the k best tokens of a row each has its probability p among all tokens, and r: the length of the
longest n-gram, of at most five tokens, that stands in prompt or output already and that the text
would end with again; 0 for a token that has not come yet. Its score is p - alpha f(r), and f is
`resistance`. Where r is 0 for all of the k the row stays as it is, so the text follows the greedy
one until it would come round, and leaves the circle by the token that meets least resistance. The
n-grams are kept in a table that grows with the text and is taken back with it.

Paper: Lan et al., Momentum Decoding: Open-ended Text Generation As Graph Exploration,
arXiv:2212.02175
Guarantee: lossy: tokens that repeat the text lose probability, on purpose; whatever drafts, the
text has exactly the distribution that this leaves
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- it changes rows, so that it goes with any method and at any temperature; at temperature 0 its
tokens are the paper's. Above it, a token is drawn with a probability in proportion to p - alpha
f(r), where that is positive
- the paper's other tables are spec strings: `resistance=0 1 1 2 3 4` is its Chinese one; its table
that blocks 4-grams is `no_repeat_ngram_size` of sampling
- tokens beyond the k best come after them, in their own order, so that a grammar that forbids all
k finds another
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.processor import About, Processor, Track
from foretell.core.settings import Range
from foretell.errors import BadConfig
from foretell.ops.logits import best_and_log_sums

SMALL = 1e-3  # a score below which its logarithm is continued by a straight line


@dataclass(frozen=True)
class Momentum(Processor):
    """The settings of momentum decoding; with alpha=0 nothing changes."""

    # probability that each unit of resistance takes off
    alpha: Annotated[float, Range(0, 100)] = 0.2
    k: Annotated[int, Range(1, 1000000)] = 5  # best tokens that are compared
    resistance: tuple[int, ...] = (0, 1, 2, 3, 4, 5)  # f of r = 0 and so on to the longest

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range = all(0 <= f <= 1000 for f in self.resistance)
        if not 2 <= len(self.resistance) <= 64 or not in_range:
            expected = "2 to 64 whole numbers from 0 to 1000, the first for tokens that are new"
            raise BadConfig.field("momentum:resistance", self.resistance, expected)

    @property
    def off(self) -> bool:
        return not self.alpha or not any(self.resistance)

    def start_track(self, about: About) -> Grams:
        return Grams(self)


class Grams(Track):
    """The n-grams of a text, and those that ended first at each of its positions."""

    def __init__(self, config: Momentum):
        super().__init__()
        self.config = config
        self.max_length = len(config.resistance) - 1
        self.known_grams: set[tuple[int, ...]] = set()
        self.new_grams: list[
            list[tuple[int, ...]]
        ] = []  # of each place, those that came first there

    def take_token(self, token: int) -> None:
        path = self.path
        fresh_grams = []
        for gram_length in range(1, min(self.max_length, len(path)) + 1):
            gram = tuple(path[-gram_length:])
            if gram not in self.known_grams:
                fresh_grams.append(gram)
        self.known_grams.update(fresh_grams)
        self.new_grams.append(fresh_grams)

    def forget_behind(self, length: int) -> None:
        for grams in self.new_grams[length:]:
            self.known_grams.difference_update(grams)
        del self.new_grams[length:]

    def repeat_length(self, token: int) -> int:
        """Returns r of a token after the path: the length of the longest n-gram it would
        repeat.
        """
        repeated_length = 0
        for gram_length in range(1, min(self.max_length, len(self.path) + 1) + 1):
            if (*self.path[len(self.path) + 1 - gram_length :], token) not in self.known_grams:
                break
            repeated_length = gram_length
        return repeated_length

    def warp_scores(self, scores: torch.Tensor) -> torch.Tensor:
        values, places, log_sums = best_and_log_sums(scores[None], self.config.k)
        ranked_tokens = zip(places[0].tolist(), values[0].tolist(), strict=True)
        best_scores = {token: score for token, score in ranked_tokens if score > -math.inf}
        resistances = [self.config.resistance[self.repeat_length(token)] for token in best_scores]
        if not any(resistances):
            return scores
        log_sum = float(log_sums)
        resisted_scores = [
            continued_log(math.exp(score - log_sum) - self.config.alpha * resistance)
            for score, resistance in zip(best_scores.values(), resistances, strict=True)
        ]
        # The others keep their distances to the last of the k, and come below the lowest.
        lowest_score = min(best_scores.values()) - log_sum
        changed_scores = scores + (min(0, min(resisted_scores) - lowest_score) - log_sum)
        changed_scores[list(best_scores)] = torch.tensor(
            resisted_scores, dtype=changed_scores.dtype, device=changed_scores.device
        )
        return changed_scores


def continued_log(score: float) -> float:
    """Returns the logarithm of a score, which goes on in a straight line where this is small or
    negative: a finite number, in the same order as the score.
    """
    if score < SMALL:
        return math.log(SMALL) + (score - SMALL) / SMALL
    return math.log(score)
