"""Chains that the first layers of the target draft, with its own norm and head.

They run on the target's own cache: the rows they write stay, and so do the hidden states that leave
them, so that the forward which verifies the chain runs the other layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Message
from foretell.errors import BadConfig
from foretell.ops.logits import likeliest

if TYPE_CHECKING:
    import torch

    from foretell.core.context import Context

Enough = Callable[[float], bool]


def layer_count(ctx: Context, method: str) -> int:
    """How many layers the target has. Raises BadConfig where there is no exit before the last."""
    count = len(ctx.models["target"].layout)
    if count < 2:
        raise BadConfig(
            f"{method}: {ctx.models['target'].name} has {count} layer, and an early exit needs "
            "two; use another method"
        )
    return count


def exit_chain(
    ctx: Context,
    exit_layer: int,
    length: int,
    source: str,
    taps: Sequence[int] = (),
    enough: Enough | None = None,
    best: bool = False,
) -> Generator[Message, Any, TokenTree]:
    """A chain of `length` tokens that the layers below `exit_layer` draft.

    Each is drawn from their law under the request's sampling options; at temperature 0, and with
    `best` at any, it is their best.
    The chain ends early with a token that ends the text, or behind one of whose chance `enough`
    says so. `taps`: hidden states that verification will want; those below the exit are kept.
    """
    tree = TokenTree(ctx.tokens[-1])
    layers = tuple(range(exit_layer))
    wanted = tuple(sorted({exit_layer, *(tap for tap in taps if tap < exit_layer)}))
    node = 0
    best = best or ctx.sampler.greedy
    for place in range(length):
        reply = yield Ask(tree, branch=ctx.branch, rows=[node], taps=wanted, layers=layers)
        node, chance = _add(ctx, tree, node, reply.logits[0], source, place + 1, best)
        if ctx.ends(tree, node) or (enough is not None and enough(chance)):
            break
    if node:  # the last token's rows, without which all layers would run anew
        yield Ask(tree, branch=ctx.branch, rows=[], taps=wanted, layers=layers)
    return tree


def _add(
    ctx: Context,
    tree: TokenTree,
    node: int,
    row: torch.Tensor,
    source: str,
    key: int,
    best: bool,
) -> tuple[int, float]:
    """Adds what row (V,) says behind `node`; returns the new node and its chance."""
    sampler = ctx.sampler
    output = [*ctx.output, *tree.tokens_to(node)]
    law: Law | None = None
    if best:
        scores = sampler.scores(row, output)
        token, chance = likeliest(scores)
    else:
        q = sampler.law(row, output)
        token = ctx.rng.sample(q, "draft", len(ctx.output), key)
        chance = float(q[token])
        law = Law(q)
    value = tree.values[node] * chance
    return tree.add(node, token, law=law, value=value, source=source), chance
