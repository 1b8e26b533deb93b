"""Trees of a draft model that grow level by level: one draft forward for all nodes of a level."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.drafters.model.reader import DraftReader

# (tree, node, row (V,) after it, count) -> the nodes of at most `count` children that it added
AddChildren = Callable[[TokenTree, int, torch.Tensor, int], list[int]]


def grow_levels(
    ctx: Context,
    reader: DraftReader,
    budget: int,
    length: int,
    branches: Sequence[int],
    add: AddChildren,
) -> Generator[Ask, Any, TokenTree]:
    """A tree of at most `length` levels and `budget` nodes, the root counted.

    `branches`: children of each node, level by level; the last number holds for all deeper levels.
    Where the budget does not suffice, a level leaves one node to each that follows, and has its own
    children shared out evenly; those of nodes that `add` returned first come first. Nothing is
    drafted behind a token that ends the text.
    """
    tree = TokenTree(ctx.tokens[-1])
    if not reader.can_read(ctx.tokens):
        return tree
    level = [0]
    for depth in range(min(length, reader.depth(ctx))):
        # Decided before anything of the level is drawn, so that no draw can sway it.
        room = budget - len(tree) - (length - 1 - depth)
        most = branches[min(depth, len(branches) - 1)]
        counts = shares(most, len(level), max(room, min(1, budget - len(tree))))
        level = level[: len(counts)]
        if not level:
            break
        reply = yield Ask(tree, reader.name, ctx.branch, rows=level)
        below: list[int] = []
        for node, count, row in zip(level, counts, reader.rows(reply), strict=True):
            below += add(tree, node, row, count)
        level = [child for child in below if not ctx.ends(tree, child)]
    return tree


def shares(branches: int, nodes: int, room: int) -> list[int]:
    """How many children each node of a level has, `room` in all at most; nodes at the end that
    have none are left out.
    """
    if not nodes:
        return []
    each, over = divmod(room, nodes)
    counts = [min(branches, each + (rank < over)) for rank in range(nodes)]
    return [count for count in counts if count]
