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

from foretell.drafters.heads.networks.ranks import Path, Table, best_paths, path_probability

LIMITS = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80)  # sizes of forwards that are weighed
RESTART = 1e-6  # probability that a step begins anew in state P, as the first of every request does
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


def trim_rows(
    end_chances: Sequence[float], promises: Sequence[float], total: int
) -> tuple[int, ...]:
    """How many rows each node has, at least one, so that at most `total` are left: from P at all
    nodes those are taken away that promise least.

    `end_chances`: the probability that a step ends at each node. `promises[n - 1]`: the tokens of a
    step in state n.
    """
    max_rows = len(promises)
    counts = [max_rows] * len(end_chances)

    def loss(node: int) -> float:
        row_index = counts[node] - 1
        return end_chances[node] * (promises[row_index] - promises[row_index - 1])

    heap = [(loss(node), node) for node in range(len(end_chances))] if max_rows > 1 else []
    heapq.heapify(heap)
    for _ in range(sum(counts) - total):
        if not heap:
            break
        _, node = heapq.heappop(heap)
        counts[node] -= 1
        if counts[node] > 1:
            heapq.heappush(heap, (loss(node), node))
    return tuple(counts)


def steady_shares(transitions: np.ndarray) -> np.ndarray:
    """The share of steps (P,) in each state, where `transitions[n, m]` is the probability that
    state m follows state n; the first step of a text is in state P.
    """
    state_count = len(transitions)
    start_vector = np.zeros(state_count)
    start_vector[-1] = RESTART
    shares: np.ndarray = np.linalg.solve(
        (np.eye(state_count) - (1 - RESTART) * transitions).T, start_vector
    )
    return shares


class Shapes:
    """The best trees of every size, for each state; they begin with those of smaller sizes."""

    def __init__(self, table: Table, largest: int):
        self.states = len(table)
        self.paths: list[list[Path]] = []
        self.promises: list[list[float]] = []  # by state and size: the tokens of a step
        self.parents: list[list[int]] = []  # of each path its parent's place, 0 the root
        for n in range(1, self.states + 1):
            paths = best_paths(table[:n], largest)
            node_numbers = {
                (): 0,
                **{path: node_number for node_number, path in enumerate(paths, 1)},
            }
            path_values = [path_probability(table, path) for path in paths]
            self.paths.append(paths)
            self.promises.append([1.0, *(1.0 + np.cumsum(path_values)).tolist()])
            self.parents.append([node_numbers[path[:-1]] for path in paths])

    def step_tokens(self, state: int, size: int) -> float:
        """Tokens of a step in this state (from 0) whose tree has so many nodes, the root not
        counted.
        """
        path_promises = self.promises[state]
        return path_promises[min(size, len(path_promises) - 1)]

    def end_chances(self, state: int, size: int) -> list[float]:
        """The probability that a step ends at the root, and at each node. They sum to 1."""
        path_promises = self.promises[state]
        size = min(size, len(path_promises) - 1)
        end_chances = [1.0, *(path_promises[i + 1] - path_promises[i] for i in range(size))]
        for node_number, parent in enumerate(self.parents[state][:size], 1):
            end_chances[parent] -= path_promises[node_number] - path_promises[node_number - 1]
        return end_chances

    def rows_by_state(self, limit: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Rows of the nodes of each state's tree, where state n has sizes[n - 1] nodes."""
        promises = [self.step_tokens(state, size) for state, size in enumerate(sizes)]
        state_rows = []
        for state, size in enumerate(sizes):
            end_chances = self.end_chances(state, size)
            state_rows.append(trim_rows(end_chances, promises, limit - len(end_chances)))
        return state_rows

    def mean_tokens(self, limit: int, sizes: Sequence[int]) -> float:
        """Mean tokens of a step, over the states in which steps find themselves."""
        transitions = np.zeros((self.states, self.states))
        for state, counts in enumerate(self.rows_by_state(limit, sizes)):
            for count, end_chance in zip(
                counts, self.end_chances(state, sizes[state]), strict=True
            ):
                transitions[state, count - 1] += end_chance
        promises = [self.step_tokens(state, size) for state, size in enumerate(sizes)]
        return float(steady_shares(transitions) @ promises)

    def state_trees(self, limit: int, sizes: Sequence[int]) -> StateTrees:
        rows = self.rows_by_state(limit, sizes)
        trees = [
            SparseTree(tuple(paths[: len(counts) - 1]), counts)
            for paths, counts in zip(self.paths, rows, strict=True)
        ]
        return StateTrees(tuple(trees), self.mean_tokens(limit, sizes))


@lru_cache(512)
def best_trees(table: tuple[tuple[float, ...], ...], limit: int, max_nodes: int) -> StateTrees:
    """The trees of the sizes that bring most tokens a step, of at most `max_nodes` nodes each.

    From a few sizes on those of one state after the other are changed while that brings more.
    """
    largest = max(0, min(limit // 2 - 1, max_nodes))
    shapes = Shapes(table, largest)
    best_sizes, best_tokens = [0] * len(table), 0.0
    for share in BEGIN:
        sizes = [max(min(1, largest), round(share * largest))] * len(table)
        tokens = shapes.mean_tokens(limit, sizes)
        while True:
            old_sizes = list(sizes)
            for state, size_change in product(range(len(table)), STEPS):
                size = sizes[state] + size_change
                new_sizes = [*sizes[:state], size, *sizes[state + 1 :]]
                if min(1, largest) <= size <= largest:
                    new_tokens = shapes.mean_tokens(limit, new_sizes)
                    if new_tokens > tokens + 1e-12:
                        tokens, sizes = new_tokens, new_sizes
            if sizes == old_sizes:
                break
        # Of equal ones the larger: sizes of states that no step comes to count near a text's end.
        if (round(tokens, 9), sum(sizes)) > (round(best_tokens, 9), sum(best_sizes)):
            best_sizes, best_tokens = sizes, tokens
    return shapes.state_trees(limit, best_sizes)


@lru_cache(512)
def full_trees(table: tuple[tuple[float, ...], ...], limit: int, max_nodes: int) -> StateTrees:
    """A tree with P rows below every node: all steps are in state P."""
    size = max(0, min(limit // (len(table) + 1) - 1, max_nodes))
    return Shapes(table, size).state_trees((size + 1) * (len(table) + 1), [size] * len(table))


def best_limit(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The place of the size with the most tokens a second."""
    return max(range(len(tokens)), key=lambda size_index: tokens[size_index] / seconds[size_index])
