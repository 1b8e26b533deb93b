"""While the target's later layers run, a draft model prepares a draft for each likely next token.

The target verifies a window of gamma drafted tokens in two parts. Behind its first layers (`exit`)
its own head gives an early guess of what follows each slot of the window. While the other layers
run, the draft model continues the kappa likeliest tokens of every slot by gamma tokens each. Then
the last layer decides, as ever: so many tokens of the window hold, and one more token follows them.
Where that token is one of those continued at its slot, its continuation is the next window, and
drafting took no time of its own; else the next window is drafted when all is known. The laws that
tokens were drawn from go with their branch. Nothing of the text hangs on the guesses.

Paper: Bhendawade et al., Mirror Speculative Decoding: Breaking the Serial Barrier in LLM
Inference, arXiv:2510.13161
Guarantee: exact
Cost: target 1, layers 1, draft 6 at most
Needs: a target whose layers can be run in two parts (the first counts as layers), a draft model
with its tokenizer that can read trees, a lane other than inline to win time by it
Trains: the draft model, best distilled from the target
Differs:
- the window's own next token is not continued a second time; the next likeliest takes its place
- the early guesses have the request's penalties, bans and form, so that none is spent on a token
that cannot follow
- the draft model says one token a step: the paper's has streams trained to say several
- the first window, and every one behind a token that was not guessed, is drafted in the open
- how many layers, kappa and gamma the paper takes is not known here; `exit` is half of the layers
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.source import Direct, source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Outcome, Reply, Steps, Together
from foretell.drafters.model.chains import chain_below, children, cut
from foretell.drafters.model.reader import DraftReader
from foretell.drafters.model.without_replacement import best_tokens
from foretell.engine import lanes
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.strategy import Strategy, settle
from foretell.verification.acceptance import default

Guesses = Mapping[int, list[int]]  # of a slot, the node it follows: tokens, the likeliest first


@dataclass(frozen=True)
class Mirror(Strategy):
    """`gamma`, `kappa` and `exit` are counts."""

    gamma: int = 3  # tokens of a window
    kappa: int = 2  # likely tokens of each slot that are continued; 0: ordinary speculation
    exit: int = 0  # layers before the early guess; 0: half of them
    lane: str = "inline"  # where the draft model computes: inline, thread, stream, process

    models = ("draft",)
    needs = ("layers",)

    def __post_init__(self) -> None:
        for name, low, high in (("gamma", 1, 64), ("kappa", 0, 1 << 20), ("exit", 0, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"mirror:{name}", value, f"between {low} and {high}")
        lanes.check("mirror", self.lane)

    def bring(self, models: Any) -> Any:
        return lanes.bring(self.lane, models, "draft")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported for what it cannot do with these models."""
        layers = len(ctx.models["target"].layout)
        middle = self.exit or layers // 2
        if not 0 < middle < layers:
            raise BadConfig.field("mirror:exit", self.exit, f"between 1 and {layers - 1} here")
        if source_of(ctx.request) != Direct():
            raise BadConfig(
                "mirror reads the target's layers itself, so it cannot take rows from a source "
                "(guidance, an ensemble); use another method with it"
            )
        draft = ctx.models["draft"]
        if self.kappa and "tree" not in draft.caps:
            cure = "use kappa=0 or another draft model"
            raise Unsupported.missing("mirror", draft.name, "branching trees", cure)
        return self._steps(ctx, middle)

    def _steps(self, ctx: Context, middle: int) -> Steps:
        reader = DraftReader(ctx)
        early = tuple(range(middle))
        with closing(lanes.open_lane(self.lane, ctx, "draft")) as lane:
            window = yield from lane.over(self.draft(ctx, reader))
            while True:
                branches = window
                slots = range(len(window))
                if self.kappa:
                    ask = Ask(window, branch=ctx.branch, rows=slots, taps=(middle,), layers=early)
                    reply = yield ask
                    guesses = self.guesses(ctx, window, reply.logits)
                    # The whole forward goes on from the states that were tapped.
                    ask = Ask(window, branch=ctx.branch, rows=slots)
                    prepare = lane.over(self.branches(ctx, reader, window, guesses))
                    reply, branches = yield Together([answered(ask), prepare])
                else:
                    reply = yield Ask(window, branch=ctx.branch, rows=slots)
                outcome, kept = yield from settle(ctx, window, reply, default)
                if kept.reason:
                    return
                ready = prepared(window, branches, outcome)
                if ready is None:
                    window = yield from lane.over(self.draft(ctx, reader))
                else:
                    window = cut(chain_below(branches, ready), ctx.depth)

    def draft(self, ctx: Context, reader: DraftReader) -> Drafting:
        """A window below the last token."""
        window = TokenTree(ctx.tokens[-1])
        if not reader.can_read(ctx.tokens):
            return window
        for drawn in range(self.gamma):
            if drawn >= reader.depth(ctx) or ctx.ends(window, drawn):
                break
            reply = yield Ask(window, "draft", ctx.branch, rows=[drawn])
            children(ctx, window, drawn, reader.rows(reply)[0], draws=drawn)
        return window

    def guesses(self, ctx: Context, window: TokenTree, rows: torch.Tensor) -> Guesses:
        """What may follow each slot, by the early rows (slots, V)."""
        likely: dict[int, list[int]] = {}
        for slot, row in enumerate(rows):
            if not ctx.ends(window, slot):
                scores = ctx.sampler.scores(row, [*ctx.output, *window.tokens_to(slot)])
                best = [token for token, _ in best_tokens(scores, self.kappa + 1)]
                others = [token for token in best if window.child(slot, token) < 0]
                likely[slot] = others[: self.kappa]
        return likely

    def branches(
        self, ctx: Context, reader: DraftReader, window: TokenTree, guesses: Guesses
    ) -> Drafting:
        """The window with every guess at its slot, and at most gamma tokens below each."""
        tree = chain_below(window, 0)  # a copy: the target reads the window meanwhile
        tips = []
        if reader.can_read(ctx.tokens):
            for slot, tokens in guesses.items():
                known = [token for token in tokens if token < reader.model.vocab]
                tips += [tree.add(slot, token) for token in known]
        draws = self.gamma  # those of a window that was drafted in this round have the first keys
        for _ in range(self.gamma):
            room = reader.depth(ctx)
            tips = [tip for tip in tips if tree.depths[tip] < room and not ctx.ends(tree, tip)]
            if not tips:
                break
            reply = yield Ask(tree, "draft", ctx.branch, rows=tips)
            below = []
            for tip, row in zip(tips, reader.rows(reply), strict=True):
                below += children(ctx, tree, tip, row, draws=draws, source="mirror")
                draws += 1
            tips = below
        return tree


def prepared(window: TokenTree, branches: TokenTree, outcome: Outcome) -> int | None:
    """The node of `branches` that the text now ends with; None: it was not guessed."""
    if outcome.token is None:
        return None
    slot = outcome.path[-1] if outcome.path else 0
    node = branches.child(slot, outcome.token)
    return node if node >= len(window) else None


def answered(ask: Ask) -> Steps:
    """The reply to an ask, as a part of a Together."""
    reply: Reply = yield ask
    return reply
