"""Children of a tree's nodes of which no token comes twice: drawn, or the best at temperature 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from foretell.core.tree import Law, TokenTree

if TYPE_CHECKING:
    from foretell.core.context import Context


class Urn:
    """A distribution q (V,) that tokens are drawn from without replacement.

    Each is drawn from q without those before it, renormalised: in the distribution that
    Gumbel-top-k has.
    `without`: tokens that are never drawn.
    """

    def __init__(self, q: torch.Tensor, without: Sequence[int] = ()):
        self.q = q
        self.rest = q.clone()
        self.rest[list(without)] = 0
        self.left = float(self.rest.sum())  # probability of all that may still be drawn; 0: nothing

    def next_law(self) -> torch.Tensor:
        """The distribution (V,) of the next draw."""
        return self.rest / self.left

    def remove_token(self, token: int) -> None:
        self.rest[token] = 0
        self.left = float(self.rest.sum())

    def keep_tokens(self, allowed_tokens: torch.Tensor) -> None:
        """Removes all tokens but these, a bool (V,)."""
        self.rest = self.rest * allowed_tokens.to(self.rest)
        self.left = float(self.rest.sum())

    def add_draw(self, ctx: Context, tree: TokenTree, node: int, key: int, source: str) -> int:
        """Draws one more token and adds it below `node`; returns its node.

        `key`: no other draw of this step has it. The node's value is its parent's times q's
        probability of the token.
        """
        law = self.next_law()
        token = ctx.rng.sample(law, "draft", len(ctx.output), key)
        self.remove_token(token)
        value = tree.values[node] * float(self.q[token])
        return tree.add(node, token, law=Law(law), value=value, source=source)


def best_tokens(scores: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """`likeliest_tokens` of processed logits (V,)."""
    return likeliest_tokens(scores.softmax(-1), count)


def likeliest_tokens(probs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """At most `count` tokens of a distribution (V,) with their probabilities, best first, ties to
    the lowest id. None of chance 0.
    """
    if not count:
        return []
    lowest_chance = probs.topk(min(count, len(probs))).values[-1]
    # Of equal probabilities topk takes any.
    ids = ((probs >= lowest_chance) & (probs > 0)).nonzero()[:, 0]
    token_chances = zip(ids.tolist(), probs[ids].tolist(), strict=True)
    return sorted(token_chances, key=lambda pair: -pair[1])[:count]


def widen_node(
    ctx: Context,
    tree: TokenTree,
    node: int,
    row: torch.Tensor,
    width: Callable[[float], int],
    max_children: int,
    source: str,
    take_best: bool = False,
) -> tuple[list[int], float]:
    """Adds children of `node` by row (V,): draws, or at temperature 0, and with `take_best` at any,
    the best tokens.

    Returns them, the first one drawn or the best one first, and the probability of the best token.
    There are `width` of that chance, which no draw can sway, at most `max_children`, and none where
    nothing is possible. The step must have drawn nothing but the nodes of this tree.
    """
    output = [*ctx.output, *tree.tokens_to(node)]
    if take_best or ctx.sampler.greedy:
        scores = ctx.sampler.scores(row, output)
        top_chance = float(scores.softmax(-1).max())
        child_nodes = []
        for token, probability in best_tokens(scores, min(width(top_chance), max_children)):
            child_nodes.append(
                tree.add(node, token, value=probability * tree.values[node], source=source)
            )
        return child_nodes, top_chance
    urn = Urn(ctx.sampler.law(row, output))
    top_chance = float(urn.q.max())
    child_nodes = []
    for _ in range(min(width(top_chance), max_children)):
        if urn.left > 0:
            child_nodes.append(urn.add_draw(ctx, tree, node, len(tree), source))
    return child_nodes, top_chance
