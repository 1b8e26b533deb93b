"""Redraws the tokens after the first rejected draft from the rows that the rejected drafts had.

A window of drafts is verified in one forward. After the first rejected one the target has answered
too, though for a text that is now off by a token or so: from those rows the window's next tokens
are drawn, each with the distribution of its row, and verified again by the next forward. At
temperature 0 this is plain Jacobi decoding. There is no separate drafter; it pays where a token
depends little on its nearest neighbours, as in images.

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
- rows after a text that the sampling options forbid, or that has ended, are not drawn from
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import Law, TokenTree

REDRAWN = 0.5  # estimated probability that a redrawn token is accepted if the one before it is
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

    window: Annotated[int, Range(1, 512)] = 16  # drafts verified at once
    # an empty place repeats the token so many places before it
    back: Annotated[int, Range(1, 1 << 16)] = 3

    needs = ("rows",)
    draws = True

    def start(self, ctx: Context) -> State:
        return State()

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        sampler, output = ctx.sampler, ctx.output
        tree = TokenTree(ctx.tokens[-1])
        draft_length = min(self.window, budget - 1, ctx.depth)
        first_row = len(output) - state.start  # the row for the first place
        known_rows = state.rows[first_row : first_row + draft_length]
        # The row's own text, of which tokens may have been replaced since.
        old_text = output[: state.start] + state.chain[:first_row]
        text = ctx.tokens[-self.back :]
        greedy_tokens: list[int] = []
        if len(known_rows) and sampler.greedy and sampler.plain:
            greedy_tokens = known_rows.argmax(-1).tolist()
        node = 0
        for row_index in range(draft_length):
            law: Law | None = None
            if row_index < len(greedy_tokens):
                token, probability = greedy_tokens[row_index], REDRAWN
            elif row_index < len(known_rows):
                # The declared distribution is right although its row saw another text than the one
                # now committed. Which row it is, and so q, was settled by what happened before; the
                # token is drawn from q only now, by a number that decides nothing else. So given
                # all that is known when the place is tested, the accepted tokens to its left
                # included, the token has the distribution q, and more is not asked of q. Penalties
                # make q a function of the text before it: of the row's old text, in the draw as
                # declared.
                q, probability = sampler.law(known_rows[row_index], old_text), REDRAWN
                old_text += state.chain[first_row + row_index : first_row + row_index + 1]
                if sampler.greedy:
                    token = int(q.argmax())
                else:
                    token = ctx.rng.sample(q, "draft", len(output), row_index)
                    law = Law(q)
            else:
                token, probability = text[-min(self.back, len(text))], REPEATED
                if not sampler.greedy:
                    # A rule chose the token, so its distribution is one-hot. Declared rather than
                    # left out: block verification wants a distribution at all places, other rules
                    # treat both alike.
                    law = Law(torch.ones(1), torch.tensor([token]))
            value = tree.values[node] * probability
            node = tree.add(node, token, law=law, value=value, source="jacobi")
            text.append(token)
            if ctx.ends(tree, node):
                break
        state.proposed = tree.tokens[1:]
        return tree

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        chain_nodes = [0]
        for token in state.proposed:
            child = step.tree.find_child(chain_nodes[-1], token)
            if child < 0:
                break
            chain_nodes.append(child)
        if len(chain_nodes) == 1:
            # Nothing was verified: the rows known before are still those of the places to come,
            # without the first.
            return
        output = ctx.output
        state.start = len(output) - len(step.tokens)
        state.chain = [step.tree.tokens[node] for node in chain_nodes[1:]]
        state.rows = step.reply.logits[chain_nodes]
        if not ctx.sampler.plain:
            self._forget_forbidden(ctx, state, output[: state.start], step.tokens)

    def _forget_forbidden(
        self, ctx: Context, state: State, prefix: list[int], committed: list[int]
    ) -> None:
        """Cuts the chain before a token that the options forbid or that ends the text.

        They may have no answer to what follows such a text. Committed tokens are neither.
        """
        chain = state.chain
        shared_length = 0
        while (
            shared_length < min(len(chain), len(committed))
            and chain[shared_length] == committed[shared_length]
        ):
            shared_length += 1
        for chain_index in range(shared_length, len(chain)):
            token = chain[chain_index]
            scores = ctx.sampler.scores(state.rows[chain_index], prefix + chain[:chain_index])
            forbidden = bool(scores[token] == -torch.inf)
            if forbidden or ctx.sampler.is_ended([*prefix, *chain[: chain_index + 1]]):
                state.chain = chain[:chain_index]
                state.rows = state.rows[: chain_index + 1]
                return
