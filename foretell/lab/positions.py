"""Places of the target's own text, with what both models say there.

The text is that of plain decoding under the request's sampling options. Before each of its tokens
the draft model draws a chain, which the target scores in the same forward: the laws at the chain's
root are those of every draft of one level, and the laws along it are those of chains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from foretell.core.context import Context
from foretell.core.distribution import Target
from foretell.core.drafter import Drafter
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Steps
from foretell.speculation.strategy import Strategy, settle
from foretell.verification.acceptance import TINY
from foretell.verification.block import joint_ratios


@dataclass(frozen=True)
class Position:
    """A place of a text.

    `p`, `q`: the target's law (V,) and the draft model's, in float64. `token_wise`, `block`: of the
    first 1, 2, ... tokens of the drafted chain, how many each rule accepts on the mean over its
    coins.
    """

    p: torch.Tensor
    q: torch.Tensor
    token_wise: list[float]
    block: list[float]


@dataclass(frozen=True)
class Observed(Strategy):
    """Plain decoding of at most `count` tokens, with a Position told before each."""

    drafter: Drafter  # of chains
    length: int  # tokens of a chain
    count: int
    # None: there the draft model has no law
    tell: Callable[[Position | None], None] = field(compare=False)

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.drafter.models

    def run(self, ctx: Context) -> Steps:
        state = self.drafter.start(ctx)
        for _ in range(self.count):
            tree = yield from self.drafter.steps(ctx, state, self.length + 1)
            reply = yield Ask(tree, branch=ctx.branch, rows=range(len(tree)))
            self.tell(position(tree, Target(reply.logits, ctx.sampler, ctx.output, tree)))
            root = dataclasses.replace(reply, logits=reply.logits[:1])
            _, kept = yield from settle(ctx, TokenTree(tree.tokens[0]), root)
            if kept.reason:
                return


def position(tree: TokenTree, target: Target) -> Position | None:
    """What a drawn chain and the target's rows say of its root; None: there is no chain."""
    if len(tree) == 1:
        return None
    law = tree.laws[1]
    assert law is not None, "the chain was not drawn"
    p = target.p(0).double().cpu()
    q = law.dense(len(p)).double().cpu()
    token_wise, block = chain_acceptance(tree, target)
    return Position(p / p.sum(), q / q.sum(), token_wise, block)


def chain_acceptance(tree: TokenTree, target: Target) -> tuple[list[float], list[float]]:
    """Accepted tokens of a drawn chain's first 1, 2, ... tokens, token by token and in blocks: the
    means over the rules' coins.
    """
    laws, drafts, ratios = joint_ratios(tree, target)
    reached = len(laws)  # nodes that can be accepted at all
    token_wise = [0.0]
    passed = 1.0
    held = []  # of each node, the chance that a longer chain holds it, by its own coin
    for node in range(1, reached + 1):
        p, q = laws[node - 1], drafts[node - 1]
        token = tree.tokens[node]
        passed *= min(1.0, float(p[token]) / float(q[token]))
        token_wise.append(token_wise[-1] + passed)
        if node < reached:
            surplus = float((ratios[node] * laws[node] - drafts[node]).clamp_min(0).sum())
            total = surplus + 1 - ratios[node]
            held.append(surplus / total if total > TINY else 1.0)
    block = []
    for length in range(1, reached + 1):
        coins = [*held[: length - 1], ratios[length]]
        accepted = 0.0
        for node, chance in enumerate(coins, 1):
            accepted = chance * node + (1 - chance) * accepted
        block.append(accepted)
    beyond = len(tree) - 1 - reached
    return token_wise[1:] + token_wise[-1:] * beyond, block + block[-1:] * beyond
