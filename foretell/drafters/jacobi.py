"""Redraws the tokens behind the first rejected draft from the rows that the rejected drafts had.

A window of drafts is verified in one forward. Behind the first rejected one the target has answered
too, if for a text that is now off by a token or so: from those rows the window's next tokens are
drawn, each with the law of its row, and verified again by the next forward. At temperature 0 this
is plain Jacobi decoding. No drafter is involved; it pays where a token depends little on its
nearest neighbours, as in images.

Paper: Teng, Shi, Liu, Ning, Dai, Wang, Li, Liu, Accelerating Auto-regressive Text-to-Image
Generation with Training-free Speculative Jacobi Decoding, arXiv:2410.01699
Guarantee: exact
Cost: target 1
Needs: nothing
Trains: nothing
Differs:
- an empty place of the window repeats the token `back` places before it, where the paper draws
random image tokens (back=1 and back=the length of an image's row are its neighbours left and above
- text seldom repeats its last token) - requests of a batch commit each for itself, where the
reference commits the shortest of them - rows behind a text that the sampling options forbid are not
drawn from
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foretell.core.drafter import Drafter, Feedback
from foretell.core.context import Context
from foretell.core.tree import Law, TokenTree
from foretell.errors import BadConfig

REDRAWN, REPEATED = 0.5, 0.2  # estimated chances that a token is accepted if the one before it is


@dataclass
class State:
    """The chain verified last: `rows[r]`, of (len(chain) + 1, V), is the row after chain[:r], for
    output `start` + r.
    """

    start: int = 0
    chain: list[int] = field(default_factory=list)
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
            if not 1 <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"jacobi:{name}", getattr(self, name), f"between 1 and {high}"
                )

    def start(self, ctx: Context) -> State:
        return State()

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        sampler, output, tree, node = ctx.sampler, ctx.output, TokenTree(ctx.tokens[-1]), 0
        size = min(self.window, budget - 1, ctx.depth)
        first = len(output) - state.start  # the row for the first place
        rows = state.rows[first : first + size]
        old = output[: state.start] + state.chain[:first]
        text = ctx.tokens[-self.back :]
        quick = rows.argmax(-1).tolist() if len(rows) and sampler.greedy and sampler.plain else []
        for place in range(size):
            law: Law | None = None
            if place < len(quick):
                token, chance = quick[place], REDRAWN
            elif place < len(rows):
                # The declared law is right although its row saw another text than the one now
                # committed. Which row it is, and so q, was settled by what has happened before; the
                # token is drawn from q only now, by a number that decides nothing else. So given
                # all that is known when the place is tested, the tokens accepted to its left
                # included, it has the law q, and nothing else is asked of q. Penalties and the like
                # make q a function of the text before it: of the row's own old text, in the draw as
                # declared.
                q, chance = sampler.law(rows[place], old), REDRAWN
                old += state.chain[first + place : first + place + 1]
                token = (
                    int(q.argmax())
                    if sampler.greedy
                    else ctx.rng.sample(q, "draft", len(output), place)
                )
                law = None if sampler.greedy else Law(q)
            else:
                # A rule chose it, so its law is one-hot. Declared as such rather than left out, all
                # places have a law, as block verification wants; the other rules treat both alike.
                token, chance = text[-min(self.back, len(text))], REPEATED
                law = None if sampler.greedy else Law(torch.ones(1), torch.tensor([token]))
            node = tree.add(node, token, law, tree.values[node] * chance, "jacobi")
            text.append(token)
        state.proposed = tree.tokens[1:]
        return tree

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        nodes = [0]
        for token in state.proposed:
            if (node := step.tree.child(nodes[-1], token)) < 0:
                break
            nodes.append(node)
        if len(nodes) == 1:
            # nothing was verified: the rows known before are those of the places to come, less the
            # first
            return
        chain, output = [step.tree.tokens[n] for n in nodes[1:]], ctx.output
        state.start, state.chain, state.rows = (
            len(output) - len(step.tokens),
            chain,
            step.reply.logits[nodes],
        )
        if ctx.sampler.plain:
            return
        # The options are never asked what follows a text they forbid, or an end: they may have no
        # answer.
        taken = next(
            (i for i, (a, b) in enumerate(zip(chain, step.tokens, strict=False)) if a != b),
            len(step.tokens),
        )
        for r, token in enumerate(chain[taken:], taken):
            scores = ctx.sampler.scores(state.rows[r], output[: state.start] + chain[:r])
            if token in ctx.sampler.stops or scores[token] == -torch.inf:
                state.chain, state.rows = chain[:r], state.rows[: r + 1]
                break
