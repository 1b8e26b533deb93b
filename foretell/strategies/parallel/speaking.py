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
from foretell.speculation.strategy import verify_and_commit

if TYPE_CHECKING:
    from foretell.core.context import Context

# From a row of logits (V,) and the tokens that the step said before it to the row's token; None: it
# is not taken, and none after it.
Choice = Callable[[torch.Tensor, Sequence[int]], int | None]


def choose_spoken(
    ctx: Context, rows: Sequence[torch.Tensor], choose: Choice
) -> tuple[list[int], list[torch.Tensor]]:
    """The tokens that rows (V,) say, each knowing those before it; the text's end is the last one.

    Returns the rows that were taken beside them.
    """
    tokens: list[int] = []
    taken_rows: list[torch.Tensor] = []
    for row in rows:
        token = choose(row, tokens)
        if token is None:
            break
        tokens.append(token)
        taken_rows.append(row)
        if ctx.sampler.is_ended([*ctx.output, *tokens]):
            break
    return tokens, taken_rows


def commit_spoken(
    ctx: Context,
    reply: Reply,
    tokens: Sequence[int],
    taken_rows: Sequence[torch.Tensor],
    source_name: str,
    first_source: str = "target",
) -> Generator[Message, Any, Kept]:
    """Commits the spoken tokens. `source_name`: whose they are, and `first_source` whose the first
    is.
    """
    tree = TokenTree(ctx.tokens[-1])
    for node_index, token in enumerate(tokens[:-1]):
        tree.add(node_index, token, source=source_name if node_index else first_source)
    last_source = source_name if len(tokens) > 1 else first_source
    outcome = Outcome([*range(1, len(tree))], tokens[-1])
    spoken_reply = Reply(torch.stack([*taken_rows]), reply.hidden, [], seconds=reply.seconds)
    spoken_reply.computed_by = reply.computed_by
    _, commit_result = yield from verify_and_commit(
        ctx, tree, spoken_reply, lambda *_: outcome, last_source
    )
    return commit_result


def draft_chain(ctx: Context, tokens: Sequence[int], source_name: str) -> TokenTree:
    """A draft below the text, up to where it ends or the request has no more room."""
    tree = TokenTree(ctx.tokens[-1])
    node = 0
    for token in tokens[: max(0, ctx.depth)]:
        node = tree.add(node, token, source=source_name)
        if ctx.ends(tree, node):
            break
    return tree


def count_rows_below(ctx: Context, tree: TokenTree, count: int) -> list[int]:
    """How many rows each node of a chain has that is verified: as many as there is room for."""
    row_counts = []
    for node, depth in enumerate(tree.depths):
        is_end = node > 0 and ctx.ends(tree, node)
        row_counts.append(0 if is_end else max(0, min(count, ctx.depth - depth - 1)))
    return row_counts


def noise_at(ctx: Context, position: int, index: int = 0) -> float:
    """The uniform number by which the token at this position of the output is drawn; with an index
    another one. A half where nothing is drawn, and where a door opens all outcomes in turn.
    """
    uniform = getattr(ctx.rng, "uniform", None)
    if uniform is None or ctx.sampler.greedy:
        return 0.5
    return float(uniform("target", position, index))
