"""Children of a tree's nodes of which no token comes twice: drawn, or the best at temperature 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from foretell.core.tree import Law, TokenTree

if TYPE_CHECKING:
    from foretell.core.context import Context


class Urn:
    """A law q (V,) that tokens are drawn from without replacement.

    Each is drawn from q without those before it, renormalised: in the law that Gumbel-top-k has.
    `without`: tokens that are never drawn.
    """

    def __init__(self, q: torch.Tensor, without: Sequence[int] = ()):
        self.q = q
        self.rest = q.clone()
        self.rest[list(without)] = 0
        self.left = float(self.rest.sum())  # chance of all that may still be drawn; 0: nothing

    def law(self) -> torch.Tensor:
        """The law (V,) of the next draw."""
        return self.rest / self.left

    def remove(self, token: int) -> None:
        self.rest[token] = 0
        self.left = float(self.rest.sum())

    def keep(self, allowed: torch.Tensor) -> None:
        """Removes all tokens but these, a bool (V,)."""
        self.rest = self.rest * allowed.to(self.rest)
        self.left = float(self.rest.sum())

    def add(self, ctx: Context, tree: TokenTree, node: int, key: int, source: str) -> int:
        """Draws one more token and adds it below `node`; returns its node.

        `key`: no other draw of this step has it. The node's value is its parent's times q's chance
        of the token.
        """
        law = self.law()
        token = ctx.rng.sample(law, "draft", len(ctx.output), key)
        self.remove(token)
        value = tree.values[node] * float(self.q[token])
        return tree.add(node, token, law=Law(law), value=value, source=source)


def best_tokens(scores: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """`likeliest` of processed logits (V,)."""
    return likeliest(scores.softmax(-1), count)


def likeliest(law: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """At most `count` tokens of a law (V,) with their chances, best first, ties to the lowest id.
    None of chance 0.
    """
    if not count:
        return []
    least = law.topk(min(count, len(law))).values[-1]
    # Of equal chances topk takes any.
    ids = ((law >= least) & (law > 0)).nonzero()[:, 0]
    pairs = zip(ids.tolist(), law[ids].tolist(), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


def widen(
    ctx: Context,
    tree: TokenTree,
    node: int,
    row: torch.Tensor,
    width: Callable[[float], int],
    room: int,
    source: str,
    best: bool = False,
) -> tuple[list[int], float]:
    """Adds children of `node` by row (V,): draws, or at temperature 0, and with `best` at any, the
    best tokens.

    Returns them, the first one drawn or the best one first, and the chance of the best token.
    There are `width` of that chance, which no draw can sway, at most `room`, and none where nothing
    is possible. The step must have drawn nothing but the nodes of this tree.
    """
    output = [*ctx.output, *tree.tokens_to(node)]
    if best or ctx.sampler.greedy:
        scores = ctx.sampler.scores(row, output)
        chance = float(scores.softmax(-1).max())
        nodes = []
        for token, share in best_tokens(scores, min(width(chance), room)):
            nodes.append(tree.add(node, token, value=share * tree.values[node], source=source))
        return nodes, chance
    urn = Urn(ctx.sampler.law(row, output))
    chance = float(urn.q.max())
    nodes = []
    for _ in range(min(width(chance), room)):
        if urn.left > 0:
            nodes.append(urn.add(ctx, tree, node, len(tree), source))
    return nodes, chance
