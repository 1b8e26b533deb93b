"""Trees of a fixed shape, chosen by how often each rank of a drafter is right at each depth.

A place in such a tree is named by the ranks on the way to it. Its value is the product of their
probabilities, as if depths were independent.

Source: Cai et al., Medusa (arXiv 2401.10774), section 2.3.3.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Path = tuple[int, ...]
Table = Sequence[Sequence[float]]  # by depth and rank: how often it is the target's token


def smooth_table(table: Table) -> list[list[float]]:
    """The table with no rank above a better one: what else it says is chance."""
    return [sorted(row, reverse=True) for row in table]


def typical_table(first_shares: Sequence[float], ranks: int = 10) -> tuple[tuple[float, ...], ...]:
    """A table for drafters of which none was counted: of first ranks these shares by depth, and of
    the r-th 1/r^2 of that.
    """
    return tuple(
        tuple(first_share / (rank + 1) ** 2 for rank in range(ranks))
        for first_share in first_shares
    )


def best_paths(table: Table, count: int) -> list[Path]:
    """The `count` places of the highest values, best first; fewer where the table has no more.

    A place comes after its parent and after the sibling of the rank before. Rows of the table must
    not rise, see `smooth_table`.
    """
    heap: list[tuple[float, Path]] = []
    if table and table[0]:
        heap.append((-table[0][0], (0,)))
    paths: list[Path] = []
    while heap and len(paths) < count:
        value, path = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < len(table[depth]):
            sibling = (*path[:-1], rank + 1)
            heapq.heappush(heap, (-path_probability(table, sibling), sibling))
        if depth + 1 < len(table) and table[depth + 1]:
            heapq.heappush(heap, (value * table[depth + 1][0], (*path, 0)))
    return paths


def path_probability(table: Table, path: Path) -> float:
    """The probability that all of a path is right."""
    return math.prod(table[depth][rank] for depth, rank in enumerate(path))


def expected_tokens(table: Table, paths: Sequence[Path]) -> float:
    """Tokens a step of a tree of these paths, with the target's own."""
    return 1 + sum(path_probability(table, path) for path in paths)
