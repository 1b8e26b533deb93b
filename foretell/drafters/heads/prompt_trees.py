"""Trees whose nodes carry rows that draft the next tree: how many nodes, and how many rows each.

A node with n rows below it is followed, where a step ends there, by a draft at most n deep: the
next step is then in state n. For each state there is one tree, and all of them have at most `limit`
nodes and rows together. More nodes promise more tokens now, more rows more tokens next time.

Source: Chen et al., "Hardware-Aware Parallel Prompt Decoding" (arXiv 2405.18628), sections 3.3 and
3.4.

    P  rows of a node at most; states are 1 to P
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from foretell.drafters.heads.networks.ranks import Path, Table, best_paths, value_of

LIMITS = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80)  # sizes of forwards that are weighed
RESTART = 1e-6  # chance that a step begins anew in state P, as the first of every request does
BEGIN = (0.4, 1.0)  # shares of the largest size with which a search begins
STEPS = (8, -8, 3, -3, 2, -2, 1, -1)  # by which a size is changed


@dataclass(frozen=True)
class SparseTree:
    """`paths`: its nodes by ranks, parents first; `counts[0]` rows below the root, and
    `counts[i + 1]` below the node of paths[i].
    """

    paths: tuple[Path, ...]
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Nodes and rows, the root counted."""
        return len(self.counts) + sum(self.counts)


@dataclass(frozen=True)
class StateTrees:
    """`trees[n - 1]` is drafted in state n. `tokens`: what a step brings on the mean."""

    trees: tuple[SparseTree, ...]
    tokens: float


def trimmed(ending: Sequence[float], promises: Sequence[float], total: int) -> tuple[int, ...]:
    """How many rows each node has, at least one, so that at most `total` are left: from P at all
    nodes those are taken away that promise least.

    `ending`: the chance that a step ends at each node. `promises[n - 1]`: the tokens of a step in
    state n.
    """
    most = len(promises)
    counts = [most] * len(ending)

    def loss(node: int) -> float:
        last = counts[node] - 1
        return ending[node] * (promises[last] - promises[last - 1])

    heap = [(loss(node), node) for node in range(len(ending))] if most > 1 else []
    heapq.heapify(heap)
    for _ in range(sum(counts) - total):
        if not heap:
            break
        _, node = heapq.heappop(heap)
        counts[node] -= 1
        if counts[node] > 1:
            heapq.heappush(heap, (loss(node), node))
    return tuple(counts)


def steady(moves: np.ndarray) -> np.ndarray:
    """The share of steps (P,) in each state, where `moves[n, m]` is the chance that state m
    follows state n; the first step of a text is in state P.
    """
    states = len(moves)
    begin = np.zeros(states)
    begin[-1] = RESTART
    found: np.ndarray = np.linalg.solve((np.eye(states) - (1 - RESTART) * moves).T, begin)
    return found


class Shapes:
    """The best trees of every size, for each state; they begin with those of smaller sizes."""

    def __init__(self, table: Table, largest: int):
        self.states = len(table)
        self.paths: list[list[Path]] = []
        self.promises: list[list[float]] = []  # by state and size: the tokens of a step
        self.parents: list[list[int]] = []  # of each path its parent's place, 0 the root
        for n in range(1, self.states + 1):
            paths = best_paths(table[:n], largest)
            places = {(): 0, **{path: place for place, path in enumerate(paths, 1)}}
            values = [value_of(table, path) for path in paths]
            self.paths.append(paths)
            self.promises.append([1.0, *(1.0 + np.cumsum(values)).tolist()])
            self.parents.append([places[path[:-1]] for path in paths])

    def promise(self, state: int, size: int) -> float:
        """Of a step in this state (from 0) whose tree has so many nodes, the root not counted."""
        known = self.promises[state]
        return known[min(size, len(known) - 1)]

    def ending(self, state: int, size: int) -> list[float]:
        """The chance that a step ends at the root, and at each node. They sum to 1."""
        known = self.promises[state]
        size = min(size, len(known) - 1)
        chances = [1.0, *(known[i + 1] - known[i] for i in range(size))]
        for place, parent in enumerate(self.parents[state][:size], 1):
            chances[parent] -= known[place] - known[place - 1]
        return chances

    def rows(self, limit: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Of each state's tree the rows of its nodes, where state n has sizes[n - 1] nodes."""
        promises = [self.promise(state, size) for state, size in enumerate(sizes)]
        found = []
        for state, size in enumerate(sizes):
            ending = self.ending(state, size)
            found.append(trimmed(ending, promises, limit - len(ending)))
        return found

    def tokens(self, limit: int, sizes: Sequence[int]) -> float:
        """What a step brings on the mean, over the states in which steps find themselves."""
        moves = np.zeros((self.states, self.states))
        for state, counts in enumerate(self.rows(limit, sizes)):
            for count, chance in zip(counts, self.ending(state, sizes[state]), strict=True):
                moves[state, count - 1] += chance
        promises = [self.promise(state, size) for state, size in enumerate(sizes)]
        return float(steady(moves) @ promises)

    def trees(self, limit: int, sizes: Sequence[int]) -> StateTrees:
        rows = self.rows(limit, sizes)
        trees = [
            SparseTree(tuple(paths[: len(counts) - 1]), counts)
            for paths, counts in zip(self.paths, rows, strict=True)
        ]
        return StateTrees(tuple(trees), self.tokens(limit, sizes))


@lru_cache(512)
def best_trees(table: tuple[tuple[float, ...], ...], limit: int, most: int) -> StateTrees:
    """The trees of the sizes that bring most tokens a step, of at most `most` nodes each.

    From a few sizes on those of one state after the other are changed while that brings more.
    """
    largest = max(0, min(limit // 2 - 1, most))
    shapes = Shapes(table, largest)
    best, found = [0] * len(table), 0.0
    for share in BEGIN:
        sizes = [max(min(1, largest), round(share * largest))] * len(table)
        tokens = shapes.tokens(limit, sizes)
        while True:
            before = list(sizes)
            for state, by in product(range(len(table)), STEPS):
                size = sizes[state] + by
                tried = [*sizes[:state], size, *sizes[state + 1 :]]
                if min(1, largest) <= size <= largest:
                    more = shapes.tokens(limit, tried)
                    if more > tokens + 1e-12:
                        tokens, sizes = more, tried
            if sizes == before:
                break
        # Of equal ones the larger: sizes of states that no step comes to count near a text's end.
        if (round(tokens, 9), sum(sizes)) > (round(found, 9), sum(best)):
            best, found = sizes, tokens
    return shapes.trees(limit, best)


@lru_cache(512)
def full_trees(table: tuple[tuple[float, ...], ...], limit: int, most: int) -> StateTrees:
    """One tree with P rows below every node: all steps are in state P."""
    size = max(0, min(limit // (len(table) + 1) - 1, most))
    return Shapes(table, size).trees((size + 1) * (len(table) + 1), [size] * len(table))


def best_limit(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The place of the size with the most tokens a second."""
    return max(range(len(tokens)), key=lambda place: tokens[place] / seconds[place])
