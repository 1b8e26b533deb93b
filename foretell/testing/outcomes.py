"""A source of randomness that takes every outcome in turn and says how probable it was.

A function that draws only from it is run once for each sequence of outcomes, depth first. The
weights are exact, so the law of a decoder is computed instead of estimated from samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")
Key = tuple[int, str, int, int]  # (branch, purpose, position, index) of a draw


class NotEnumerable(AssertionError):
    """A draw has infinitely many outcomes."""


class Enumerator:
    """A run of a function. `for weight, value in Enumerator.walk_outcomes(function)` makes all of
    them.

    Raises AssertionError where one key is used for two draws, which would then be dependent.
    """

    def __init__(self, script: list[int]):
        self.script = script  # which branch each draw takes; draws beyond its end take the first
        self.choices: list[list[tuple[int, float]]] = []  # the branches of each draw so far
        self.weight = 1.0  # probability of the branches taken
        self.used: set[Key] = set()
        self.branch = 0

    def at(self, branch: int) -> Enumerator:
        """The door for the draws of another branch."""
        return BranchDoor(self, branch)

    def choose_branch(self, branches: list[tuple[int, float]], key: Key) -> int:
        """Takes one of the branches (value, probability)."""
        if key in self.used:
            raise AssertionError(f"the draw {key} was used twice: draws would be dependent")
        self.used.add(key)
        draw = len(self.choices)
        if draw == len(self.script):
            self.script.append(0)
        value, probability = branches[self.script[draw]]
        self.choices.append(branches)
        self.weight *= probability
        return value

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        total_mass = float(p.sum())
        branches = []
        for token, share in enumerate(p.tolist()):
            if share > 0:
                branches.append((token, float(share) / total_mass))
        return self.choose_branch(branches, (self.branch, purpose, position, index))

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        if chance <= 0 or chance >= 1:
            return chance >= 1
        branches = [(1, chance), (0, 1 - chance)]
        return bool(self.choose_branch(branches, (self.branch, purpose, position, index)))

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        raise NotEnumerable("Gumbel noise has no finite list of outcomes; test by counts instead")

    @staticmethod
    def walk_outcomes(function: Callable[[Enumerator], T]) -> Iterator[tuple[float, T]]:
        """Yields (probability, result) of every outcome, depth first; probabilities sum to 1."""
        script: list[int] = []
        while True:
            door = Enumerator(script)
            result = function(door)
            yield door.weight, result
            # The next outcome: the last draw that has another branch takes it.
            while script and script[-1] + 1 == len(door.choices[len(script) - 1]):
                script.pop()
            if not script:
                return
            script[-1] += 1


class BranchDoor(Enumerator):
    """The door of another branch of the same request: its draws are outcomes of the same walk."""

    def __init__(self, door: Enumerator, branch: int):
        self.door = door
        self.branch = branch

    def at(self, branch: int) -> Enumerator:
        return self.door.at(branch)

    def choose_branch(self, branches: list[tuple[int, float]], key: Key) -> int:
        return self.door.choose_branch(branches, key)
