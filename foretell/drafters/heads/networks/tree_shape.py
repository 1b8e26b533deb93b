"""The limits within which a head's tree grows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeShape:
    """Limits of a tree that grows by its nodes' probabilities."""

    depth: int = 8  # levels
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 59  # nodes that are kept, those with the likeliest paths
    least: float = 0.0  # no level follows one whose best path is less likely
    share: float = 0.0  # children less likely than this share of their best sibling are dropped
    reads: int = 0  # tokens of a prompt that the head reads, the last ones; 0: all of them
