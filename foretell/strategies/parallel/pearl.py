"""A draft model writes the next tokens while the target still verifies the last ones.

Each round the target computes the rows of the unverified tail, and the draft model at the same time
gamma tokens after it, on the assumption that all of the tail will hold. Without a tail that is the
paper's pre-verification: the target's row judges the first of the gamma tokens. With a tail, which
has gamma - 1 tokens, it is post-verification: the rows judge the tail and the first new token.
Where all hold, the other gamma - 1 new tokens are the next tail; at the first that does not, the
target's correction is written and what was drafted after it forgotten. So a run of accepted tokens
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
- where the draft model may write nothing more (at the limits of length or context) the row after
the tail gives a token of the target's own; elsewhere that row judges the draft
- drafting starts at the first token; the published code wants gamma + 1 tokens before it
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from foretell.core.context import Context
from foretell.core.distribution import Target
from foretell.core.drafter import Drafting
from foretell.core.random import Door
from foretell.core.settings import OneOf, Range
from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Outcome, Steps, Together
from foretell.drafters.model.chains import chain_below, continue_chains, cut_chain
from foretell.drafters.model.reader import DraftReader
from foretell.engine import lanes
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.verification.acceptance import verify_by_default


class UpTo(Target):
    """The target's distributions up to a node whose own row was not asked for: nothing is read
    after it.
    """

    def __init__(self, target: Target, last_node: int):
        super().__init__(target.rows, target.sampler, target.output, target.tree)
        self.last = last_node

    def ends(self, node: int) -> bool:
        return node == self.last or super().ends(node)


def without_bonus(
    last_node: int, tree: TokenTree, target: Target, rng: Door, position: int
) -> Outcome:
    """The usual verification of a chain, which ends with node `last_node` where that is
    accepted.
    """
    return verify_by_default(tree, UpTo(target, last_node), rng, position)


@dataclass(frozen=True)
class Pearl(Strategy):
    """`gamma` is a count of tokens: best about as many as a step of the target takes of the
    draft model's.
    """

    gamma: Annotated[int, Range(1, 256)] = 4  # tokens drafted while the target computes
    # where the draft model computes: inline, thread, stream, process
    lane: Annotated[str, OneOf(lanes.LANES)] = "inline"

    models = ("draft",)

    def bring(self, models: Any) -> Any:
        return lanes.bring_remote(self.lane, models, "draft")

    def run(self, ctx: Context) -> Steps:
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        reader = DraftReader(ctx)
        with closing(lanes.open_lane(self.lane, ctx, "draft")) as lane:
            tail = TokenTree(ctx.tokens[-1])
            while True:
                verification = source.read_rows(ctx, state, tail, ())
                drafting = lane.over(self.draft_ahead(ctx, reader, tail))
                reply, drafted_chain = yield Together([verification, drafting])
                first_new_node = len(tail)  # the node of the first new token, if there is one
                judged_chain = cut_chain(drafted_chain, first_new_node)
                verify_rule = partial(without_bonus, first_new_node)
                outcome, commit_result = yield from verify_and_commit(
                    ctx, judged_chain, reply, verify_rule
                )
                if commit_result.reason:
                    return
                if outcome.path and outcome.path[-1] == first_new_node:
                    tail = cut_chain(chain_below(drafted_chain, first_new_node), ctx.depth)
                else:
                    tail = TokenTree(ctx.tokens[-1])

    def draft_ahead(self, ctx: Context, reader: DraftReader, tail: TokenTree) -> Drafting:
        """The tail with at most gamma tokens after it."""
        chain = chain_below(tail, 0)  # a copy: the target reads the tail meanwhile
        if not reader.can_read(ctx.tokens):
            return chain
        for draw_index in range(self.gamma):
            last_node = len(chain) - 1
            if chain.depths[last_node] >= reader.max_depth(ctx) or ctx.ends(chain, last_node):
                break
            reply = yield Ask(chain, "draft", ctx.branch, rows=[last_node])
            continue_chains(
                ctx, chain, last_node, reader.resized_rows(reply)[0], draw_count=draw_index
            )
        return chain
