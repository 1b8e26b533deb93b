"""Tokens that a draft model says: drawn from its laws, or its best ones at temperature 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask
from foretell.ops.trees import add_drawn

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.drafter import Drafting
    from foretell.ops.reading import DraftReader


def children(
    ctx: Context,
    tree: TokenTree,
    node: int,
    row: torch.Tensor,
    count: int = 1,
    draws: int = 0,
    source: str = "draft",
) -> list[int]:
    """Continues `count` chains from `node` by row (V,); `draws` were made in this step before.

    Returns the node of each, the same one for those that drew the same token.
    """
    sampler = ctx.sampler
    output = [*ctx.output, *tree.tokens_to(node)]
    if sampler.greedy:
        scores = sampler.scores(row, output)
        token = int(scores.argmax())
        chance = float((scores[token] - scores.logsumexp(-1)).exp())
        return [tree.add(node, token, value=tree.values[node] * chance, source=source)]
    q = sampler.law(row, output)
    keys = range(draws + 1, draws + 1 + count)
    tokens = [ctx.rng.sample(q, "draft", len(ctx.output), key) for key in keys]
    return add_drawn(tree, node, Law(q), tokens, source)


def chains(
    ctx: Context,
    reader: DraftReader,
    model: str,
    length: int,
    drafts: int,
    budget: int,
    confidence: float = 0.0,
) -> Drafting:
    """A tree of `drafts` chains of at most `length` tokens, drawn independently by `model` and
    merged by prefix.

    `confidence`: a chain ends where the model's best token is less likely than this.
    """
    tree = TokenTree(ctx.tokens[-1])
    if not reader.can_read(ctx.tokens):
        return tree
    count = min(1 if ctx.sampler.greedy else drafts, budget - 1)
    level = {0: count}  # node -> chains that go on from it
    draws = 0
    for _ in range(min(length, reader.depth(ctx))):
        # Decided before anything of the level is drawn, so that no draw can sway it.
        if not any(level.values()) or len(tree) + sum(level.values()) > budget:
            break
        reply = yield Ask(tree, model, ctx.branch, rows=list(level))
        below: dict[int, int] = {}
        for (node, going), row in zip(level.items(), reader.rows(reply), strict=True):
            if confidence and float(row.softmax(-1).max()) < confidence:
                continue
            for child in children(ctx, tree, node, row, going, draws, model):
                if not ctx.ends(tree, child):
                    below[child] = below.get(child, 0) + 1
            draws += going
        level = below
    return tree


def chain_below(tree: TokenTree, node: int) -> TokenTree:
    """The chain that hangs below `node`, as a tree of its own with this node as its root."""
    chain = TokenTree(tree.tokens[node])
    end = 0
    while tree.tries[node]:
        node = tree.tries[node][0]
        law, value, source = tree.laws[node], tree.values[node], tree.sources[node]
        end = chain.add(end, tree.tokens[node], law=law, value=value, source=source)
    return chain


def cut(chain: TokenTree, depth: int) -> TokenTree:
    """The chain's first `depth` tokens. Only where no draw decides `depth` it keeps its law."""
    if len(chain) <= depth + 1:
        return chain
    short = TokenTree(chain.tokens[0])
    for node in range(1, depth + 1):
        law, value, source = chain.laws[node], chain.values[node], chain.sources[node]
        short.add(node - 1, chain.tokens[node], law=law, value=value, source=source)
    return short
