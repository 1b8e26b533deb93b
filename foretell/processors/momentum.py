"""A token that would repeat an n-gram of the text meets a resistance, the more the longer it is.

Of the k best tokens of a row each has its probability p among all tokens, and r: the length of the
longest n-gram, of at most five tokens, that stands in prompt or output already and that the text
would end with again; 0 for a token that has not come yet. Its score is p - alpha f(r), and f is
`resistance`. Where r is 0 for all of the k the row stays as it is, so the text follows the greedy
one until it would come round, and leaves the circle by the token that meets least resistance. The
n-grams are kept in a table that grows with the text and is taken back with it.

Paper: Lan et al., Momentum Decoding: Open-ended Text Generation As Graph Exploration,
arXiv:2212.02175
Guarantee: lossy: tokens that repeat the text lose chance, on purpose; whatever drafts, the text has
exactly the law that this leaves
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- it changes rows, so that it goes with any method and at any temperature; at temperature 0 its
tokens are the paper's. Above it, a token is drawn with a chance in proportion to p - alpha f(r),
where that is positive
- the paper's other tables are spec strings: `resistance=0 1 1 2 3 4` is its Chinese one; its table
that blocks 4-grams is `no_repeat_ngram_size` of sampling
- tokens beyond the k best come behind them, in their own order, so that a grammar that forbids all
k finds another
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from foretell.core.processor import About, Track, Warper
from foretell.errors import BadConfig
from foretell.ops.logits import best_and_log_sums

SMALL = 1e-3  # a score below which its logarithm is continued by a straight line


@dataclass(frozen=True)
class Momentum(Warper):
    """With alpha=0 it changes nothing."""

    alpha: float = 0.2  # chance that each unit of resistance takes off
    k: int = 5  # best tokens that are compared
    resistance: tuple[int, ...] = (0, 1, 2, 3, 4, 5)  # f of r = 0 and so on to the longest

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 100:
            raise BadConfig.field("momentum:alpha", self.alpha, "between 0 and 100")
        if not 1 <= self.k <= 1_000_000:
            raise BadConfig.field("momentum:k", self.k, "between 1 and 1000000")
        whole = all(0 <= f <= 1000 for f in self.resistance)
        if not 2 <= len(self.resistance) <= 64 or not whole:
            allowed = "2 to 64 whole numbers from 0 to 1000, the first for tokens that are new"
            raise BadConfig.field("momentum:resistance", self.resistance, allowed)

    @property
    def off(self) -> bool:
        return not self.alpha or not any(self.resistance)

    def track(self, about: About) -> Grams:
        return Grams(self)


class Grams(Track):
    """The n-grams of a text, each with the place where it first ended."""

    def __init__(self, config: Momentum):
        super().__init__()
        self.config = config
        self.longest = len(config.resistance) - 1
        self.known: set[tuple[int, ...]] = set()
        self.first: list[list[tuple[int, ...]]] = []  # of each place, those that came first there

    def push(self, token: int) -> None:
        path = self.path
        fresh = []
        for n in range(1, min(self.longest, len(path)) + 1):
            gram = tuple(path[-n:])
            if gram not in self.known:
                fresh.append(gram)
        self.known.update(fresh)
        self.first.append(fresh)

    def cut(self, length: int) -> None:
        for grams in self.first[length:]:
            self.known.difference_update(grams)
        del self.first[length:]

    def repeated(self, token: int) -> int:
        """r of a token behind the path."""
        r = 0
        for n in range(1, min(self.longest, len(self.path) + 1) + 1):
            if (*self.path[len(self.path) + 1 - n :], token) not in self.known:
                break
            r = n
        return r

    def warped(self, scores: torch.Tensor) -> torch.Tensor:
        values, places, log_sums = best_and_log_sums(scores[None], self.config.k)
        ranked = zip(places[0].tolist(), values[0].tolist(), strict=True)
        chosen = {token: score for token, score in ranked if score > -math.inf}
        lost = [self.config.resistance[self.repeated(token)] for token in chosen]
        if not any(lost):
            return scores
        total = float(log_sums)
        left = [
            in_order(math.exp(score - total) - self.config.alpha * resistance)
            for score, resistance in zip(chosen.values(), lost, strict=True)
        ]
        # The others keep their distances to the last of the k, and come below the lowest.
        last = min(chosen.values()) - total
        warped = scores + (min(0, min(left) - last) - total)
        warped[list(chosen)] = torch.tensor(left, dtype=warped.dtype, device=warped.device)
        return warped


def in_order(score: float) -> float:
    """The logarithm of a score, which goes on in a straight line where this is small or negative:
    a finite number, in the same order as the score.
    """
    if score < SMALL:
        return math.log(SMALL) + (score - SMALL) / SMALL
    return math.log(score)
