"""Redraws the tokens behind the first rejected draft from the rows that the rejected drafts had.

A window of drafts is verified in one forward. Behind the first rejected one the target has answered
too, though for a text that is now off by a token or so: from those rows the window's next tokens
are drawn, each with the law of its row, and verified again by the next forward. At temperature 0
this is plain Jacobi decoding. There is no separate drafter; it pays where a token depends little on
its nearest neighbours, as in images.

Paper: Teng, Shi, Liu, Ning, Dai, Wang, Li, Liu, Accelerating Auto-regressive Text-to-Image
Generation with Training-free Speculative Jacobi Decoding, arXiv:2410.01699
Guarantee: exact
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- an empty place of the window repeats the token `back` places before it, where the paper draws
random image tokens; back=1 and back=the length of an image's row are its neighbours left and above,
and text seldom repeats its last token
- requests of a batch commit each for itself, where the reference commits the shortest of them
- rows behind a text that the sampling options forbid, or that has ended, are not drawn from
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.tree import Law, TokenTree
from foretell.errors import BadConfig

REDRAWN = 0.5  # estimated chance that a redrawn token is accepted if the one before it is
REPEATED = 0.2  # the same of a token that fills an empty place


@dataclass
class State:
    """The chain verified last, and the target's rows along it."""

    start: int = 0  # output tokens before the chain
    chain: list[int] = field(default_factory=list)
    # (len(chain) + 1, V): row r is the one after chain[:r], for output token start + r
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    proposed: list[int] = field(default_factory=list)  # the chain of the step under way


@dataclass(frozen=True)
class Jacobi(Drafter):
    """Both are counts of tokens."""

    window: int = 16  # drafts verified at once
    back: int = 3  # an empty place repeats the token so many places before it

    needs = ("rows",)
    draws = True

    def __post_init__(self) -> None:
        for name, high in (("window", 512), ("back", 65536)):
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise BadConfig.field(f"jacobi:{name}", value, f"between 1 and {high}")

    def start(self, ctx: Context) -> State:
        return State()

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        sampler, output = ctx.sampler, ctx.output
        tree = TokenTree(ctx.tokens[-1])
        size = min(self.window, budget - 1, ctx.depth)
        first = len(output) - state.start  # the row for the first place
        rows = state.rows[first : first + size]
        # The row's own text, of which tokens may have been replaced since.
        old_text = output[: state.start] + state.chain[:first]
        text = ctx.tokens[-self.back :]
        greedy: list[int] = []
        if len(rows) and sampler.greedy and sampler.plain:
            greedy = rows.argmax(-1).tolist()
        node = 0
        for place in range(size):
            law: Law | None = None
            if place < len(greedy):
                token, chance = greedy[place], REDRAWN
            elif place < len(rows):
                # The declared law is right although its row saw another text than the one now
                # committed. Which row it is, and so q, was settled by what happened before; the
                # token is drawn from q only now, by a number that decides nothing else. So given
                # all that is known when the place is tested, the accepted tokens to its left
                # included, the token has the law q, and more is not asked of q. Penalties make q a
                # function of the text before it: of the row's old text, in the draw as declared.
                q, chance = sampler.law(rows[place], old_text), REDRAWN
                old_text += state.chain[first + place : first + place + 1]
                if sampler.greedy:
                    token = int(q.argmax())
                else:
                    token = ctx.rng.sample(q, "draft", len(output), place)
                    law = Law(q)
            else:
                token, chance = text[-min(self.back, len(text))], REPEATED
                if not sampler.greedy:
                    # A rule chose the token, so its law is one-hot. Declared rather than left out:
                    # block verification wants a law at all places, other rules treat both alike.
                    law = Law(torch.ones(1), torch.tensor([token]))
            value = tree.values[node] * chance
            node = tree.add(node, token, law=law, value=value, source="jacobi")
            text.append(token)
            if ctx.ends(tree, node):
                break
        state.proposed = tree.tokens[1:]
        return tree

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        nodes = [0]
        for token in state.proposed:
            child = step.tree.child(nodes[-1], token)
            if child < 0:
                break
            nodes.append(child)
        if len(nodes) == 1:
            # Nothing was verified: the rows known before are still those of the places to come,
            # without the first.
            return
        output = ctx.output
        state.start = len(output) - len(step.tokens)
        state.chain = [step.tree.tokens[node] for node in nodes[1:]]
        state.rows = step.reply.logits[nodes]
        if not ctx.sampler.plain:
            self._forget_forbidden(ctx, state, output[: state.start], step.tokens)

    def _forget_forbidden(
        self, ctx: Context, state: State, before: list[int], committed: list[int]
    ) -> None:
        """Cuts the chain before a token that the options forbid or that ends the text.

        They may have no answer to what follows such a text. Committed tokens are neither.
        """
        chain = state.chain
        same = 0
        while same < min(len(chain), len(committed)) and chain[same] == committed[same]:
            same += 1
        for place in range(same, len(chain)):
            token = chain[place]
            scores = ctx.sampler.scores(state.rows[place], before + chain[:place])
            forbidden = bool(scores[token] == -torch.inf)
            if forbidden or ctx.sampler.ended([*before, *chain[: place + 1]]):
                state.chain = chain[:place]
                state.rows = state.rows[: place + 1]
                return
