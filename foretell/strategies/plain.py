"""Decoding without drafts: one forward, one token.

Everything else is measured against it and must equal it.

Paper: none
Guarantee: exact
Cost: target 1
Needs: nothing
Trains: nothing
Differs: in nothing known
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.core.engine import Context
from foretell.core.sampling import Target
from foretell.core.strategy import Strategy
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Kept, Reply, Steps
from foretell.core.verify import walk


@dataclass(frozen=True)
class Plain(Strategy):
    """Nothing to set."""

    def run(self, ctx: Context) -> Steps:
        while True:
            tree = TokenTree(ctx.tokens[-1])
            reply: Reply = yield Ask(tree)
            target = Target(reply.logits, ctx.sampler, ctx.output, tree.words)
            outcome = walk(tree, target, ctx.rng, len(ctx.output))
            kept: Kept = yield Commit([outcome.token], reply.logits, sources=["target"])
            if kept.reason:
                return
