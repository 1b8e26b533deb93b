"""A draft model writes the next tokens while the target still verifies the last ones.

Each round the target computes the rows of the unverified tail, and the draft model at the same time
gamma tokens behind it, on the assumption that all of the tail will hold. Without a tail that is the
paper's pre-verification: the target's row judges the first of the gamma tokens. With a tail, which
has gamma - 1 tokens, it is post-verification: the rows judge the tail and the first new token.
Where all hold, the other gamma - 1 new tokens are the next tail; at the first that does not, the
target's correction is written and what was drafted behind it forgotten. So a run of accepted tokens
has no longest length, and no forward of the target waits for a draft. Verified tokens are all that
is ever written or streamed.

Paper: Liu et al., PEARL: Parallel Speculative Decoding with Adaptive Draft Length, arXiv:2408.11850
Guarantee: exact
Cost: target 1, draft gamma
Needs: a draft model with the target's tokenizer; a lane other than inline to win time by it
Trains: the draft model, best distilled from the target
Differs:
- draws are keyed by the round's position and their place in it; the published code seeds one
position twice, so that two decisions share a draw
- an end inside a draft, a stop and the length limit end the text at the token where they fall; the
published loop returns the unverified tail there
- where the draft model may write nothing more (at the limits of length or context) the row behind
the tail gives a token of the target's own; elsewhere that row judges the draft
- drafting starts at the first token; the published code wants gamma + 1 tokens before it
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from foretell.core.context import Context
from foretell.core.distribution import Target
from foretell.core.drafter import Drafting
from foretell.core.random import Door
from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Outcome, Steps, Together
from foretell.drafters.model.chains import chain_below, children, cut
from foretell.drafters.model.reader import DraftReader
from foretell.engine import lanes
from foretell.errors import BadConfig
from foretell.speculation.strategy import Strategy, settle
from foretell.verification.acceptance import default


class UpTo(Target):
    """The target's laws up to a node whose own row was not asked for: nothing is read behind it."""

    def __init__(self, target: Target, last: int):
        super().__init__(target.rows, target.sampler, target.output, target.tree)
        self.last = last

    def ends(self, node: int) -> bool:
        return node == self.last or super().ends(node)


def without_bonus(last: int, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """The usual verification of a chain, which ends with node `last` where that is accepted."""
    return default(tree, UpTo(target, last), rng, position)


@dataclass(frozen=True)
class Pearl(Strategy):
    """`gamma` is a count of tokens: best about as many as a step of the target takes of the
    draft model's.
    """

    gamma: int = 4  # tokens drafted while the target computes
    lane: str = "inline"  # where the draft model computes: inline, thread, stream, process

    models = ("draft",)

    def __post_init__(self) -> None:
        if not 1 <= self.gamma <= 256:
            raise BadConfig.field("pearl:gamma", self.gamma, "between 1 and 256")
        lanes.check("pearl", self.lane)

    def bring(self, models: Any) -> Any:
        return lanes.bring(self.lane, models, "draft")

    def run(self, ctx: Context) -> Steps:
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        reader = DraftReader(ctx)
        with closing(lanes.open_lane(self.lane, ctx, "draft")) as lane:
            tail = TokenTree(ctx.tokens[-1])
            while True:
                verify = source.read(ctx, state, tail, ())
                roll = lane.over(self.roll(ctx, reader, tail))
                reply, drafted = yield Together([verify, roll])
                first = len(tail)  # the node of the first new token, if there is one
                judged = cut(drafted, first)
                rule = partial(without_bonus, first)
                outcome, kept = yield from settle(ctx, judged, reply, rule)
                if kept.reason:
                    return
                if outcome.path and outcome.path[-1] == first:
                    tail = cut(chain_below(drafted, first), ctx.depth)
                else:
                    tail = TokenTree(ctx.tokens[-1])

    def roll(self, ctx: Context, reader: DraftReader, tail: TokenTree) -> Drafting:
        """The tail with at most gamma tokens behind it."""
        chain = chain_below(tail, 0)  # a copy: the target reads the tail meanwhile
        if not reader.can_read(ctx.tokens):
            return chain
        for drawn in range(self.gamma):
            end = len(chain) - 1
            if chain.depths[end] >= reader.depth(ctx) or ctx.ends(chain, end):
                break
            reply = yield Ask(chain, "draft", ctx.branch, rows=[end])
            children(ctx, chain, end, reader.rows(reply)[0], draws=drawn)
        return chain
