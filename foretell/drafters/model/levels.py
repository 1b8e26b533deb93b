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
    drafted after a token that ends the text.
    """
    tree = TokenTree(ctx.tokens[-1])
    if not reader.can_read(ctx.tokens):
        return tree
    level = [0]
    for depth in range(min(length, reader.max_depth(ctx))):
        # Decided before anything of the level is drawn, so that no draw can sway it.
        free_nodes = budget - len(tree) - (length - 1 - depth)
        max_children = branches[min(depth, len(branches) - 1)]
        child_counts = share_children(
            max_children, len(level), max(free_nodes, min(1, budget - len(tree)))
        )
        level = level[: len(child_counts)]
        if not level:
            break
        reply = yield Ask(tree, reader.name, ctx.branch, rows=level)
        next_level: list[int] = []
        for node, count, row in zip(level, child_counts, reader.resized_rows(reply), strict=True):
            next_level += add(tree, node, row, count)
        level = [child for child in next_level if not ctx.ends(tree, child)]
    return tree


def share_children(branches: int, node_count: int, free_nodes: int) -> list[int]:
    """How many children each node of a level has, `free_nodes` in all at most; nodes at the end
    that have none are left out.
    """
    if not node_count:
        return []
    even_share, remainder = divmod(free_nodes, node_count)
    child_counts = [min(branches, even_share + (rank < remainder)) for rank in range(node_count)]
    return [count for count in child_counts if count]
