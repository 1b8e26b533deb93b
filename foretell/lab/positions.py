"""Places of the target's own text, with what both models say there.

The text is that of plain decoding under the request's sampling options. Before each of its tokens
the draft model draws a chain, which the target scores in the same forward: the distributions at the
chain's root are those of every draft of one level, and the distributions along it are those of
chains.
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
from foretell.speculation.strategy import Strategy, verify_and_commit
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
    # None: there the draft model has no distribution
    tell: Callable[[Position | None], None] = field(compare=False)

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.drafter.models

    def run(self, ctx: Context) -> Steps:
        state = self.drafter.start(ctx)
        for _ in range(self.count):
            tree = yield from self.drafter.steps(ctx, state, self.length + 1)
            reply = yield Ask(tree, branch=ctx.branch, rows=range(len(tree)))
            self.tell(measure_position(tree, Target(reply.logits, ctx.sampler, ctx.output, tree)))
            root = dataclasses.replace(reply, logits=reply.logits[:1])
            _, outcome = yield from verify_and_commit(ctx, TokenTree(tree.tokens[0]), root)
            if outcome.reason:
                return


def measure_position(tree: TokenTree, target: Target) -> Position | None:
    """Measures the root of a drawn chain by the target's rows; None: there is no chain."""
    if len(tree) == 1:
        return None
    draft_law = tree.laws[1]
    assert draft_law is not None, "the chain was not drawn"
    target_probs = target.p(0).double().cpu()
    draft_probs = draft_law.dense(len(target_probs)).double().cpu()
    token_wise, block = chain_acceptance(tree, target)
    return Position(
        target_probs / target_probs.sum(), draft_probs / draft_probs.sum(), token_wise, block
    )


def chain_acceptance(tree: TokenTree, target: Target) -> tuple[list[float], list[float]]:
    """Accepted tokens of a drawn chain's first 1, 2, ... tokens, token by token and in blocks: the
    means over the rules' coins.
    """
    target_laws, draft_laws, ratios = joint_ratios(tree, target)
    reached_count = len(target_laws)  # nodes that can be accepted at all
    token_wise = [0.0]
    pass_probability = 1.0
    hold_probabilities = []  # that a longer chain holds a node, by its own coin, of each node
    for node in range(1, reached_count + 1):
        target_probs, draft_probs = target_laws[node - 1], draft_laws[node - 1]
        token = tree.tokens[node]
        pass_probability *= min(1.0, float(target_probs[token]) / float(draft_probs[token]))
        token_wise.append(token_wise[-1] + pass_probability)
        if node < reached_count:
            surplus = float(
                (ratios[node] * target_laws[node] - draft_laws[node]).clamp_min(0).sum()
            )
            surplus_total = surplus + 1 - ratios[node]
            hold_probabilities.append(surplus / surplus_total if surplus_total > TINY else 1.0)
    block_counts = []
    for length in range(1, reached_count + 1):
        coin_probabilities = [*hold_probabilities[: length - 1], ratios[length]]
        mean_accepted = 0.0
        for node, chance in enumerate(coin_probabilities, 1):
            mean_accepted = chance * node + (1 - chance) * mean_accepted
        block_counts.append(mean_accepted)
    unreached_count = len(tree) - 1 - reached_count
    return token_wise[1:] + token_wise[-1:] * unreached_count, block_counts + block_counts[
        -1:
    ] * unreached_count
