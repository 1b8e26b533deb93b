"""The one door for randomness: `sample`, `accept`, `gumbel`, keyed by what they decide.

`Rng` hashes (seed, branch, purpose, position, index) with splitmix64 (Steele et al. 2014), so a
draw depends on nothing but its key: not on batch mates, not on how many draws other requests made,
and branches of one request never share draws. The draw that decides the token at a position is
keyed by that position alone, so rules that only follow the target's own sample give the plain
decoder's tokens, seed by seed. `testing.outcomes.Enumerator` is the other door: it opens every
outcome in turn, so exactness is a test without luck.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from foretell.core.draws import draw_token

MASK = (1 << 64) - 1
PURPOSES = {"target": 1, "accept": 2, "draft": 3, "gumbel": 4}


class Door(Protocol):
    """A purpose is one of PURPOSES; on a branch no (purpose, position, index) is used twice."""

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        """A token drawn from the distribution p (V,), which sums to 1."""

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        """True with this probability."""

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        """Independent standard Gumbel values (size,), float64."""

    def at(self, branch: int) -> Door:
        """The door of this branch of the same request."""


def _mix_bits(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Rng:
    """The real door of one branch of a request."""

    def __init__(self, seed: int, branch: int = 0):
        self.request_seed = seed
        self.seed = _mix_bits(seed & MASK)
        if branch:
            self.seed = _mix_bits(self.seed ^ _mix_bits(branch))

    def at(self, branch: int) -> Rng:
        return Rng(self.request_seed, branch)

    def _hash_bits(self, purpose: str, position: int, index: int) -> int:
        return _mix_bits(_mix_bits(_mix_bits(self.seed ^ PURPOSES[purpose]) ^ position) ^ index)

    def uniform(self, purpose: str, position: int, index: int = 0) -> float:
        """A number in [0, 1), of 53 bits."""
        return (self._hash_bits(purpose, position, index) >> 11) * 2.0**-53

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        return draw_token(p, self.uniform(purpose, position, index))

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        return self.uniform(purpose, position, index) < chance

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        bits = self._hash_bits("gumbel", position, index)
        u = np.random.Generator(np.random.Philox(key=bits)).random(size)
        return torch.from_numpy(-np.log(-np.log1p(-u * (1 - 2.0**-53))))
