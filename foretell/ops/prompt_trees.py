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

import numpy as np

from foretell.ops.ranks import Path, Table, best_paths, expected_tokens, value_of

LIMITS = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80)  # sizes of forwards that are weighed
RESTART = 1e-6  # chance that a step begins anew in state P, as the first of every request does
ROUNDS = 8  # times that all states' sizes are searched at most


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


def masses(table: Table, paths: Sequence[Path]) -> list[float]:
    """The chance that a step ends at the root, and at each node. They sum to 1."""
    ending = {(): 1.0, **{path: value_of(table, path) for path in paths}}
    for path in paths:
        ending[path[:-1]] -= value_of(table, path)
    return list(ending.values())


def trimmed(ending: Sequence[float], promises: Sequence[float], total: int) -> tuple[int, ...]:
    """How many rows each node has, at least one, so that at most `total` are left: from P at all
    nodes those are taken away that promise least.

    `ending` of `masses`; `promises[n - 1]`: the tokens of a step in state n.
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


def state_trees(table: Table, limit: int, sizes: Sequence[int]) -> StateTrees:
    """The trees with `sizes[n - 1]` nodes in state n, the root not counted; `table` has P rows."""
    states = range(1, len(table) + 1)
    paths = [best_paths(table[:n], sizes[n - 1]) for n in states]
    promises = [expected_tokens(table, of_state) for of_state in paths]
    moves = np.zeros((len(table), len(table)))
    trees = []
    for n, of_state in enumerate(paths):
        ending = masses(table, of_state)
        counts = trimmed(ending, promises, limit - len(ending))
        for count, chance in zip(counts, ending, strict=True):
            moves[n, count - 1] += chance
        trees.append(SparseTree(tuple(of_state), counts))
    return StateTrees(tuple(trees), float(steady(moves) @ promises))


@lru_cache(512)
def best_trees(table: tuple[tuple[float, ...], ...], limit: int, most: int) -> StateTrees:
    """The trees of the sizes that bring most tokens a step, of at most `most` nodes each.

    The sizes of one state after the other are searched until none changes, from small trees, from
    large ones and from such as leave room for all rows.
    """
    largest = max(0, min(limit // 2 - 1, most))
    middle = min(largest, max(1, limit // (len(table) + 1) - 1))
    found = [searched(table, limit, largest, size) for size in {min(1, largest), middle, largest}]
    # Trees of states that no step comes to bring nothing here, but they do near a text's end.
    return max(
        found,
        key=lambda trees: (round(trees.tokens, 9), sum(len(tree.paths) for tree in trees.trees)),
    )


def searched(table: Table, limit: int, largest: int, begin: int) -> StateTrees:
    """The best trees that a search from `begin` nodes in every state comes to."""
    sizes = [begin] * len(table)
    best = state_trees(table, limit, sizes)
    for _ in range(ROUNDS):
        before = list(sizes)
        for state in range(len(table)):
            for size in range(min(1, largest), largest + 1):
                tried = state_trees(table, limit, [*sizes[:state], size, *sizes[state + 1 :]])
                if tried.tokens > best.tokens + 1e-12:
                    best, sizes[state] = tried, size
        if sizes == before:
            break
    return best


@lru_cache(512)
def full_trees(table: tuple[tuple[float, ...], ...], limit: int, most: int) -> StateTrees:
    """One tree with P rows below every node: all steps are in state P."""
    size = max(0, min(limit // (len(table) + 1) - 1, most))
    return state_trees(table, (size + 1) * (len(table) + 1), [size] * len(table))


def best_limit(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The place of the size with the most tokens a second."""
    return max(range(len(tokens)), key=lambda place: tokens[place] / seconds[place])
