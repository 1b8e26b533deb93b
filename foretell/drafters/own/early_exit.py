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
from foretell.ops.logits import likeliest_token

if TYPE_CHECKING:
    import torch

    from foretell.core.context import Context

Enough = Callable[[float], bool]


def layer_count(ctx: Context, method: str) -> int:
    """How many layers the target has. Raises BadConfig where there is no exit before the last."""
    target_layers = len(ctx.models["target"].layout)
    if target_layers < 2:
        raise BadConfig(
            f"{method}: {ctx.models['target'].name} has {target_layers} layer, and an early exit "
            "needs two; use another method"
        )
    return target_layers


def exit_chain(
    ctx: Context,
    exit_layer: int,
    length: int,
    source: str,
    taps: Sequence[int] = (),
    enough: Enough | None = None,
    take_best: bool = False,
) -> Generator[Message, Any, TokenTree]:
    """A chain of `length` tokens that the layers below `exit_layer` draft.

    Each is drawn from their distribution under the request's sampling options; at temperature 0,
    and with `take_best` at any, it is their best. The chain ends early with a token that ends the
    text, or after one of whose probability `enough` says so. `taps`: hidden states that
    verification will want; those below the exit are kept.
    """
    tree = TokenTree(ctx.tokens[-1])
    layers = tuple(range(exit_layer))
    requested_taps = tuple(sorted({exit_layer, *(tap for tap in taps if tap < exit_layer)}))
    node = 0
    take_best = take_best or ctx.sampler.greedy
    for draw_index in range(length):
        reply = yield Ask(tree, branch=ctx.branch, rows=[node], taps=requested_taps, layers=layers)
        node, probability = _add_token(
            ctx, tree, node, reply.logits[0], source, draw_index + 1, take_best
        )
        if ctx.ends(tree, node) or (enough is not None and enough(probability)):
            break
    if node:  # the last token's rows, without which all layers would run anew
        yield Ask(tree, branch=ctx.branch, rows=[], taps=requested_taps, layers=layers)
    return tree


def _add_token(
    ctx: Context,
    tree: TokenTree,
    node: int,
    row: torch.Tensor,
    source: str,
    key: int,
    take_best: bool,
) -> tuple[int, float]:
    """Adds what row (V,) says after `node`; returns the new node and its probability."""
    sampler = ctx.sampler
    output = [*ctx.output, *tree.tokens_to(node)]
    law: Law | None = None
    if take_best:
        scores = sampler.scores(row, output)
        token, probability = likeliest_token(scores)
    else:
        q = sampler.law(row, output)
        token = ctx.rng.sample(q, "draft", len(ctx.output), key)
        probability = float(q[token])
        law = Law(q)
    value = tree.values[node] * probability
    return tree.add(node, token, law=law, value=value, source=source), probability
