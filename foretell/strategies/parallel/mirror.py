"""While the target's later layers run, a draft model prepares a draft for each likely next token.

The target verifies a window of gamma drafted tokens in two parts. After its first layers (`exit`)
its own head gives an early guess of what follows each slot of the window. While the other layers
run, the draft model continues the kappa likeliest tokens of every slot by gamma tokens each. Then
the last layer decides, as ever: so many tokens of the window hold, and one more token follows them.
Where that token is one of those continued at its slot, its continuation is the next window, and
drafting took no time of its own; else the next window is drafted when all is known. The
distributions that tokens were drawn from go with their branch. Nothing of the text hangs on the
guesses.

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
- the first window, and every one after a token that was not guessed, is drafted in the open
- how many layers, kappa and gamma the paper takes is not known here; `exit` is half of the layers
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.settings import OneOf, Range
from foretell.core.source import Direct, source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Outcome, Reply, Steps, Together
from foretell.drafters.model.chains import chain_below, continue_chains, cut_chain
from foretell.drafters.model.reader import DraftReader
from foretell.drafters.model.without_replacement import best_tokens
from foretell.engine import lanes
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.verification.acceptance import verify_by_default

Guesses = Mapping[int, list[int]]  # of a slot, the node it follows: tokens, the likeliest first


@dataclass(frozen=True)
class Mirror(Strategy):
    """`gamma`, `kappa` and `exit` are counts."""

    gamma: Annotated[int, Range(1, 64)] = 3  # tokens of a window
    # likely tokens of each slot that are continued; 0: ordinary speculation
    kappa: Annotated[int, Range(0, 1 << 20)] = 2
    exit: Annotated[int, Range(0, 1024)] = 0  # layers before the early guess; 0: half of them
    # where the draft model computes: inline, thread, stream, process
    lane: Annotated[str, OneOf(lanes.LANES)] = "inline"

    models = ("draft",)
    needs = ("layers",)

    def bring(self, models: Any) -> Any:
        return lanes.bring_remote(self.lane, models, "draft")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported for what it cannot do with these models."""
        layer_count = len(ctx.models["target"].layout)
        exit_layer = self.exit or layer_count // 2
        if not 0 < exit_layer < layer_count:
            raise BadConfig.field("mirror:exit", self.exit, f"between 1 and {layer_count - 1} here")
        if source_of(ctx.request) != Direct():
            raise BadConfig(
                "mirror reads the target's layers itself, so it cannot take rows from a source "
                "(guidance, an ensemble); use another method with it"
            )
        draft_model = ctx.models["draft"]
        if self.kappa and "tree" not in draft_model.caps:
            cure = "use kappa=0 or another draft model"
            raise Unsupported.missing_capability(
                "mirror", draft_model.name, "branching trees", cure
            )
        return self._run_steps(ctx, exit_layer)

    def _run_steps(self, ctx: Context, exit_layer: int) -> Steps:
        reader = DraftReader(ctx)
        early_layers = tuple(range(exit_layer))
        with closing(lanes.open_lane(self.lane, ctx, "draft")) as lane:
            window = yield from lane.over(self.draft_window(ctx, reader))
            while True:
                branches = window
                slots = range(len(window))
                if self.kappa:
                    ask = Ask(
                        window,
                        branch=ctx.branch,
                        rows=slots,
                        taps=(exit_layer,),
                        layers=early_layers,
                    )
                    target_reply = yield ask
                    guesses = self.guess_tokens(ctx, window, target_reply.logits)
                    # The whole forward goes on from the states that were tapped.
                    ask = Ask(window, branch=ctx.branch, rows=slots)
                    prepare = lane.over(self.draft_branches(ctx, reader, window, guesses))
                    target_reply, branches = yield Together([ask_together(ask), prepare])
                else:
                    target_reply = yield Ask(window, branch=ctx.branch, rows=slots)
                outcome, commit_result = yield from verify_and_commit(
                    ctx, window, target_reply, verify_by_default
                )
                if commit_result.reason:
                    return
                prepared_node = find_prepared_node(window, branches, outcome)
                if prepared_node is None:
                    window = yield from lane.over(self.draft_window(ctx, reader))
                else:
                    window = cut_chain(chain_below(branches, prepared_node), ctx.depth)

    def draft_window(self, ctx: Context, reader: DraftReader) -> Drafting:
        """A window below the last token."""
        window = TokenTree(ctx.tokens[-1])
        if not reader.can_read(ctx.tokens):
            return window
        for draw_index in range(self.gamma):
            if draw_index >= reader.max_depth(ctx) or ctx.ends(window, draw_index):
                break
            reply = yield Ask(window, "draft", ctx.branch, rows=[draw_index])
            continue_chains(
                ctx, window, draw_index, reader.resized_rows(reply)[0], draw_count=draw_index
            )
        return window

    def guess_tokens(self, ctx: Context, window: TokenTree, rows: torch.Tensor) -> Guesses:
        """Guesses the tokens that may follow each slot, by the early rows (slots, V)."""
        likely_tokens: dict[int, list[int]] = {}
        for slot, row in enumerate(rows):
            if not ctx.ends(window, slot):
                scores = ctx.sampler.scores(row, [*ctx.output, *window.tokens_to(slot)])
                best_guesses = [token for token, _ in best_tokens(scores, self.kappa + 1)]
                find_known = partial(window.find_child, slot)
                new_guesses = [token for token in best_guesses if find_known(token) < 0]
                likely_tokens[slot] = new_guesses[: self.kappa]
        return likely_tokens

    def draft_branches(
        self, ctx: Context, reader: DraftReader, window: TokenTree, guesses: Guesses
    ) -> Drafting:
        """The window with every guess at its slot, and at most gamma tokens below each."""
        tree = chain_below(window, 0)  # a copy: the target reads the window meanwhile
        branch_tips = []
        if reader.can_read(ctx.tokens):
            for slot, tokens in guesses.items():
                known_tokens = [token for token in tokens if token < reader.model.vocab]
                branch_tips += [tree.add(slot, token) for token in known_tokens]
        draw_count = (
            self.gamma
        )  # those of a window that was drafted in this round have the first keys
        for _ in range(self.gamma):
            depth_limit = reader.max_depth(ctx)
            branch_tips = [
                tip
                for tip in branch_tips
                if tree.depths[tip] < depth_limit and not ctx.ends(tree, tip)
            ]
            if not branch_tips:
                break
            reply = yield Ask(tree, "draft", ctx.branch, rows=branch_tips)
            new_tips = []
            for tip, row in zip(branch_tips, reader.resized_rows(reply), strict=True):
                new_tips += continue_chains(
                    ctx, tree, tip, row, draw_count=draw_count, source="mirror"
                )
                draw_count += 1
            branch_tips = new_tips
        return tree


def find_prepared_node(window: TokenTree, branches: TokenTree, outcome: Outcome) -> int | None:
    """The node of `branches` that the text now ends with; None: it was not guessed."""
    if outcome.token is None:
        return None
    slot = outcome.path[-1] if outcome.path else 0
    node = branches.find_child(slot, outcome.token)
    return node if node >= len(window) else None


def ask_together(ask: Ask) -> Steps:
    """The reply to an ask, as a part of a Together."""
    reply: Reply = yield ask
    return reply
