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
from foretell.core.types import Steps
from foretell.speculation.strategy import Strategy, decode_one_by_one


@dataclass(frozen=True)
class Plain(Strategy):
    """Nothing to set."""

    one_text = True

    def run(self, ctx: Context) -> Steps:
        return decode_one_by_one(ctx)
