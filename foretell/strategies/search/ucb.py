"""A tree of texts that is searched by upper confidence bounds: where rewards are high, or unknown.

Every text has a few next tokens as edges, each with the model's probability P. Of them the one with
the highest Q + c(N) P sqrt(ln N) / (1 + n) is taken, with c(N) = ln((N + base + 1) / base) + c: the
P-UCB of Silver et al., 2017, as Zhang et al., arXiv:2303.05510, section 4, use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

Text = tuple[int, ...]  # tokens after the prompt


@dataclass
class Node:
    """A text in the tree; one that has ended has no edges."""

    text: Text
    edges: list[Edge] = field(default_factory=list)  # the likeliest first
    visits: int = 1  # N
    full_text: Text = ()  # the whole text that it was finished to


@dataclass
class Edge:
    """A next token: P, n and Q."""

    token: int
    probability: float
    visits: int = 0
    value: float = 0.0
    node: Node | None = None


Path = list[tuple[Node, Edge]]


def make_edges(next_tokens: Iterable[tuple[int, float]]) -> list[Edge]:
    """Edges that were never passed, of tokens with their probabilities."""
    return [Edge(token, chance) for token, chance in next_tokens]


def descend_tree(root: Node, c: float, base: float) -> tuple[Path, Node | None]:
    """The way from the root by the highest bounds, to a text that has ended, or to a new one
    (None).
    """
    path: Path = []
    node: Node | None = root
    while node is not None and node.edges:
        visit_count = node.visits
        exploration = (math.log((visit_count + base + 1) / base) + c) * math.sqrt(
            math.log(visit_count)
        )
        edge = max(
            node.edges,
            key=lambda candidate: (
                candidate.value + exploration * candidate.probability / (1 + candidate.visits)
            ),
        )
        path.append((node, edge))
        node = edge.node
    return path, node


def propagate_reward(path: Path, leaf: Node, reward: float) -> None:
    """Lets all nodes on the way know of a reward."""
    leaf.visits += 1
    for node, edge in path:
        node.visits += 1
        edge.value = max(edge.value, reward) if edge.visits else reward
        edge.visits += 1
