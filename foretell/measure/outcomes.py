"""The door for randomness that opens every outcome in turn and says how likely it was.

A function that draws only through it is walked depth first; the weights of its outcomes are exact,
so the law of a decoder can be computed instead of sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


class Enumerator:
    """Walks every outcome of a function that draws only through it. `for weight, value in
    Enumerator.walk(f)`.
    """

    def __init__(self, script: list[int]):
        self.script, self.taken = script, 0
        self.choices: list[list[tuple[int, float]]] = []
        self.weight = 1.0
        self.used: set[tuple[int, str, int, int]] = set()
        self.branch = 0

    def at(self, branch: int) -> Enumerator:
        """The same door, for the draws of another branch."""
        return BranchDoor(self, branch)

    def choose(self, branches: list[tuple[int, float]], key: tuple[int, str, int, int]) -> int:
        """Goes on with the outcome of this draw whose turn it is."""
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
        return self.choose(branches, (self.branch, purpose, position, index))

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        if chance <= 0 or chance >= 1:
            return chance >= 1
        return bool(self.choose([(1, chance), (0, 1 - chance)], (self.branch, purpose, position, index)))

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        raise AssertionError(
            "Gumbel noise has no finite list of outcomes; test such a method by its counts"
        )

    @staticmethod
    def walk(function: Callable[[Enumerator], T]) -> Iterator[tuple[float, T]]:
        """Yields (probability, result) of every outcome, depth first; the probabilities sum to
        1.
        """
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


class BranchDoor(Enumerator):
    """The door of another branch of the same request: its draws are outcomes of the same walk."""

    def __init__(self, door: Enumerator, branch: int):
        self.door = door
        self.branch = branch

    def at(self, branch: int) -> Enumerator:
        return BranchDoor(self.door, branch)

    def choose(self, branches: list[tuple[int, float]], key: tuple[int, str, int, int]) -> int:
        return self.door.choose(branches, key)
