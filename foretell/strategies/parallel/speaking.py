"""Tokens that enter a text as rows beside it say them, and drafts of such rows.

A step reads the text's last node and, below it, rows that have no token yet, see
drafters/heads/extra_rows.py. What is taken of them without a check is committed here, with the rows
that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Kept, Message, Outcome, Reply
from foretell.speculation.strategy import settle

if TYPE_CHECKING:
    from foretell.core.context import Context

# From a row of logits (V,) and the tokens that the step said before it to the row's token; None: it
# is not taken, and none behind it.
Choice = Callable[[torch.Tensor, Sequence[int]], int | None]


def spoken(
    ctx: Context, rows: Sequence[torch.Tensor], choose: Choice
) -> tuple[list[int], list[torch.Tensor]]:
    """The tokens that rows (V,) say, each knowing those before it; the text's end is the last one.

    Returns the rows that were taken beside them.
    """
    tokens: list[int] = []
    taken: list[torch.Tensor] = []
    for row in rows:
        token = choose(row, tokens)
        if token is None:
            break
        tokens.append(token)
        taken.append(row)
        if ctx.sampler.ended([*ctx.output, *tokens]):
            break
    return tokens, taken


def commit_spoken(
    ctx: Context,
    reply: Reply,
    tokens: Sequence[int],
    taken: Sequence[torch.Tensor],
    name: str,
    first: str = "target",
) -> Generator[Message, Any, Kept]:
    """Makes them final. `name`: whose they are, and `first` whose the first is."""
    tree = TokenTree(ctx.tokens[-1])
    for place, token in enumerate(tokens[:-1]):
        tree.add(place, token, source=name if place else first)
    last = name if len(tokens) > 1 else first
    outcome = Outcome([*range(1, len(tree))], tokens[-1])
    said = Reply(torch.stack([*taken]), reply.hidden, [], seconds=reply.seconds)
    said.computed_by = reply.computed_by
    _, kept = yield from settle(ctx, tree, said, lambda *_: outcome, last)
    return kept


def chained(ctx: Context, tokens: Sequence[int], name: str) -> TokenTree:
    """A draft below the text, up to where it ends or the request has no more room."""
    tree = TokenTree(ctx.tokens[-1])
    node = 0
    for token in tokens[: max(0, ctx.depth)]:
        node = tree.add(node, token, source=name)
        if ctx.ends(tree, node):
            break
    return tree


def rows_below(ctx: Context, tree: TokenTree, count: int) -> list[int]:
    """How many rows each node of a chain has that is verified: as many as there is room for."""
    found = []
    for node, depth in enumerate(tree.depths):
        ends = node > 0 and ctx.ends(tree, node)
        found.append(0 if ends else max(0, min(count, ctx.depth - depth - 1)))
    return found


def noise_at(ctx: Context, position: int, index: int = 0) -> float:
    """The uniform number by which the token at this position of the output is drawn; with an index
    another one. A half where nothing is drawn, and where a door opens all outcomes in turn.
    """
    uniform = getattr(ctx.rng, "uniform", None)
    if uniform is None or ctx.sampler.greedy:
        return 0.5
    return float(uniform("target", position, index))
