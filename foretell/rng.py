"""The one door for randomness: `sample`, `accept`, `gumbel`, each keyed by (purpose, position, index).

`Rng` hashes (seed, key) with splitmix64 (Steele et al. 2014), so a draw depends on nothing but its key: not on batch
mates, not on how many draws other requests made. The draw that decides the token at a position is keyed by that
position alone, so rules that only follow the target's own sample give the plain decoder's tokens, seed by seed.
`Enumerator` opens every outcome in turn and yields it with its exact probability, so exactness is a test without luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np
import torch

MASK = (1 << 64) - 1
PURPOSES = {"target": 1, "accept": 2, "residual": 3, "draft": 4, "gumbel": 5}
T = TypeVar("T")


class Door(Protocol):
    """A purpose is one of PURPOSES; no (purpose, position, index) may be used twice in a request."""

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        """A token drawn from the law p (V,), which sums to 1."""

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        """True with this probability."""

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        """Independent standard Gumbel values (size,), float64."""


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Rng:
    """The real door of one request."""

    def __init__(self, seed: int):
        self.seed = _mix(seed & MASK)

    def _bits(self, purpose: str, position: int, index: int) -> int:
        return _mix(_mix(_mix(self.seed ^ PURPOSES[purpose]) ^ position) ^ index)

    def uniform(self, purpose: str, position: int, index: int = 0) -> float:
        """In [0, 1), 53 bits."""
        return (self._bits(purpose, position, index) >> 11) * 2.0**-53

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        sums = p.cumsum(0, dtype=torch.float64)
        u = self.uniform(purpose, position, index) * float(sums[-1])
        token = int(torch.searchsorted(sums, u, right=True))
        # u can round up to the total; then the last token of positive probability is meant.
        return token if token < len(p) else int(p.nonzero()[-1])

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        return self.uniform(purpose, position, index) < chance

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        u = np.random.Generator(np.random.Philox(key=self._bits("gumbel", position, index))).random(size)
        return torch.from_numpy(-np.log(-np.log1p(-u * (1 - 2.0**-53))))


class Enumerator:
    """Walks every outcome of a function that draws only through it. `for weight, value in Enumerator.walk(f)`."""

    def __init__(self, script: list[int]):
        self.script, self.taken = script, 0
        self.choices: list[list[tuple[int, float]]] = []
        self.weight = 1.0
        self.used: set[tuple[str, int, int]] = set()

    def _choose(self, branches: list[tuple[int, float]], key: tuple[str, int, int]) -> int:
        if key in self.used:
            raise AssertionError(f"the draw {key} was used twice: draws would be dependent")
        self.used.add(key)
        if self.taken == len(self.script):
            self.script.append(0)
        value, weight = branches[self.script[self.taken]]
        self.choices.append(branches)
        self.taken += 1
        self.weight *= weight
        return value

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        total = float(p.sum())
        branches = [(token, float(w) / total) for token, w in enumerate(p.tolist()) if w > 0]
        return self._choose(branches, (purpose, position, index))

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        if chance <= 0 or chance >= 1:
            return chance >= 1
        return bool(self._choose([(1, chance), (0, 1 - chance)], (purpose, position, index)))

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        raise AssertionError("Gumbel noise has no finite list of outcomes; test such a method by its counts")

    @staticmethod
    def walk(function: Callable[[Enumerator], T]) -> Iterator[tuple[float, T]]:
        """Yields (probability, result) of every outcome, depth first; the probabilities sum to 1."""
        script: list[int] | None = []
        while script is not None:
            door = Enumerator(script)
            result = function(door)
            yield door.weight, result
            while script and script[-1] + 1 == len(door.choices[len(script) - 1]):
                script.pop()
            if script:
                script[-1] += 1
            else:
                script = None
