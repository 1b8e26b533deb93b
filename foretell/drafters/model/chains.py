"""Chains of a draft model: drawn independently and merged by their beginnings, or taken apart."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import add_drawn
from foretell.core.types import Ask
from foretell.ops.logits import likeliest_token

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.drafters.model.reader import DraftReader


def draw_chains(
    ctx: Context,
    reader: DraftReader,
    tree: TokenTree,
    chain_count: int,
    length: int,
    budget: int,
    source: str,
    confidence: float = 0.0,
    take_best: bool = False,
) -> Generator[Ask, Any, None]:
    """Draws `chain_count` chains of `length` tokens below the root of an empty tree.

    Each token is drawn from the draft model's distribution under the request's sampling options; at
    temperature 0, and with `take_best` at any, it is the best one. One draft forward grows all
    chains by one level. A chain ends with a token that ends the text, and where the best token is
    less likely than `confidence`. No level is begun that could exceed the budget.
    """
    take_best = take_best or ctx.sampler.greedy
    level = {0: chain_count}  # node -> chains that go on from it
    draw_count = 0
    length = min(length, reader.max_depth(ctx))
    # The best tokens may come from one forward, where a row alone decides which these are.
    follow_depth = min(length, budget - 1) if take_best and ctx.sampler.plain else 0
    for _ in range(length):
        # Decided before anything of the level is drawn, so that no draw can sway it.
        if not any(level.values()) or len(tree) + sum(level.values()) > budget:
            return
        reply = yield Ask(tree, reader.name, ctx.branch, rows=list(level), follow=follow_depth)
        if reply.followed:
            add_followed(ctx, tree, reply.followed, source, confidence)
            return
        follow_depth = 0
        next_level: dict[int, int] = {}
        for (node, count), row in zip(level.items(), reader.resized_rows(reply), strict=True):
            if confidence and float(row.softmax(-1).max()) < confidence:
                continue
            for child in continue_chains(
                ctx, tree, node, row, count, draw_count, source, take_best
            ):
                if not ctx.ends(tree, child):
                    next_level[child] = next_level.get(child, 0) + 1
            draw_count += count
        level = next_level


def add_followed(
    ctx: Context,
    tree: TokenTree,
    followed: Sequence[tuple[int, float, int]],
    source: str,
    confidence: float,
) -> None:
    """Adds the tokens with these probabilities below the last node, up to an end or an unlikely
    one.
    """
    node = len(tree) - 1
    for token, probability, _ in followed:
        if probability < confidence:
            return
        node = tree.add(node, token, value=tree.values[node] * probability, source=source)
        if ctx.ends(tree, node):
            return


def continue_chains(
    ctx: Context,
    tree: TokenTree,
    node: int,
    row: torch.Tensor,
    count: int = 1,
    draw_count: int = 0,
    source: str = "draft",
    take_best: bool = False,
) -> list[int]:
    """Continues `count` chains from `node` by row (V,); `draw_count` were made in this step before.

    Returns the node of each, the same one for those that drew the same token. At temperature 0, and
    with `take_best` at any, nothing is drawn.
    """
    sampler = ctx.sampler
    output = [*ctx.output, *tree.tokens_to(node)]
    if take_best or sampler.greedy:
        scores = sampler.scores(row, output)
        token, probability = likeliest_token(scores)
        return [tree.add(node, token, value=tree.values[node] * probability, source=source)]
    q = sampler.law(row, output)
    keys = range(draw_count + 1, draw_count + 1 + count)
    tokens = [ctx.rng.sample(q, "draft", len(ctx.output), key) for key in keys]
    return add_drawn(tree, node, Law(q), tokens, source)


def chain_below(tree: TokenTree, node: int) -> TokenTree:
    """The chain that hangs below `node`, as a tree of its own with this node as its root."""
    chain = TokenTree(tree.tokens[node])
    end = 0
    while tree.tries[node]:
        node = tree.tries[node][0]
        law, value, source = tree.laws[node], tree.values[node], tree.sources[node]
        end = chain.add(end, tree.tokens[node], law=law, value=value, source=source)
    return chain


def cut_chain(chain: TokenTree, depth: int) -> TokenTree:
    """The chain's first `depth` tokens. Only where no draw decides `depth` it keeps its
    distribution.
    """
    if len(chain) <= depth + 1:
        return chain
    short_chain = TokenTree(chain.tokens[0])
    for node in range(1, depth + 1):
        law, value, source = chain.laws[node], chain.values[node], chain.sources[node]
        short_chain.add(node - 1, chain.tokens[node], law=law, value=value, source=source)
    return short_chain
