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

from foretell.core.context import Context
from foretell.core.source import source_of
from foretell.core.strategy import Strategy, settle
from foretell.core.tree import TokenTree
from foretell.core.types import Steps


@dataclass(frozen=True)
class Plain(Strategy):
    """Nothing to set."""

    one_text = True

    def run(self, ctx: Context) -> Steps:
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        while True:
            tree = TokenTree(ctx.tokens[-1])
            reply = yield from source.read(ctx, state, tree, ())
            _, kept = yield from settle(ctx, tree, reply)
            if kept.reason:
                return
