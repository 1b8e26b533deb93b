"""A model that fills masks drafts a whole block in one forward; a search makes a text of it.

After the text stand `k` masks, and one forward of a masked denoiser says of each what it hides,
apart from the others. Of each position the likeliest tokens are kept, until their probabilities
reach `mass`, at most `most` of them, and whatever ends the text. A beam goes through them from left
to right. It adds up what the denoiser says of a token and what a 3-gram distribution says of it
after the two before: that distribution is counted in the request's own text, and in a corpus if one
is given. The best path is the draft.

The next k follows two moving averages: how many tokens the denoiser proposed before an end, and how
many the target agreed with. It is the first, `growth` longer while the second is not below it.

Paper: Li et al., DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding,
arXiv:2510.02358
Guarantee: exact
Cost: target 1, draft 1
Needs: a draft model that fills masks, with the target's tokenizer
Trains: nothing
Try: --model MODEL --draft CANVAS_MODEL --method diffuspec --compare
Differs:
- a path was found by a search, so its tokens have no distribution: each is accepted with the
target's own probability of it, where the paper takes min(1, p / q) by another distribution of the
denoiser; at temperature 0, where its results are from, both are the same
- the 3-gram distribution is interpolated (Witten-Bell), where the paper fits KenLM to each data set
- how much of a path is verified is limited by the policy; agreed is what the text then has of it
- penalties and bans of the request hold when a draft is verified, and not in the search
- `refresh` above 1 keeps the denoiser's rows of the text for so many drafts; the paper computes all
anew
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.settings import Range
from foretell.core.text import TokenIds, check_ids
from foretell.core.tree import TokenTree
from foretell.drafters.masked.lattice import Causal, best_path, build_lattice, search_path
from foretell.drafters.masked.masked_drafts import MaskReader
from foretell.drafters.masked.ngrams import Ngrams, token_probability
from foretell.errors import BadConfig

ORDER = 3  # tokens of an n-gram


class State:
    """State of a request."""

    def __init__(self, reader: MaskReader, corpus: Sequence[Ngrams], k: int):
        self.reader = reader
        self.own = Ngrams(ORDER)
        self.texts = [self.own, *corpus]
        self.counted = 0  # tokens of the text that are
        self.drafts = 0
        self.k = k  # masks of the next draft
        self.proposed = self.agreed = 0.0  # moving averages
        # Of the draft that is being verified: its tokens, and how many were proposed before an end.
        self.path: list[int] = []
        self.length = 0


@dataclass(frozen=True)
class Diffuspec(Drafter):
    """Counts of masks, tokens and drafts; probabilities and shares are between 0 and 1."""

    k_min: Annotated[int, Range(1, 256)] = 20  # masks of a draft at least
    k_max: Annotated[int, Range(1, 256)] = 30  # and at most, as many as the first draft has
    # masks more while the target agrees with what is proposed
    growth: Annotated[int, Range(0, 256)] = 10
    # of the moving averages: what the newest draft counts in them
    decay: Annotated[float, Range(0, 1)] = 0.5
    adaptive: bool = True  # whether lengths follow the averages; no: always k_max
    # probability that the tokens tried at a position reach together
    mass: Annotated[float, Range(0, 1)] = 0.8
    most: Annotated[int, Range(1, 256)] = 15  # tokens tried at a position, ends aside
    beam: Annotated[int, Range(1, 256)] = 3  # paths that the search keeps
    # of the denoiser in a path's score; the 3-gram distribution has the rest
    weight: Annotated[float, Range(0, 1)] = 0.5
    search: bool = True  # no: the best token of each position
    corpus: TokenIds = ()  # a text that 3-grams are counted in too
    # drafts from one that computes all of the denoiser's rows to the next; 0: one
    refresh: Annotated[int, Range(0, 1 << 20)] = 1

    models = ("draft",)
    draft_needs = ("canvas",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k_min > self.k_max:
            raise BadConfig.field("diffuspec:k_min", self.k_min, f"at most k_max ({self.k_max})")

    def start(self, ctx: Context) -> State:
        check_ids("diffuspec:corpus", self.corpus, ctx.models["target"].vocab)
        reader = MaskReader(ctx, "diffuspec")
        corpus = []
        if self.corpus and self.search and self.weight < 1:
            corpus.append(ctx.shared(lambda: Ngrams(ORDER, self.corpus), "corpus"))
        return State(reader, corpus, self.k_max)

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        state.path = []
        tree = TokenTree(ctx.tokens[-1])
        mask_count = min(state.k, ctx.depth, state.reader.mask_room(ctx))
        if min(mask_count, budget - 1) < 1 or not state.reader.can_read(ctx.tokens):
            return tree
        recompute_all = state.drafts % self.refresh == 0 if self.refresh else not state.drafts
        state.drafts += 1
        rows = yield from state.reader.mask_rows(ctx, mask_count, recompute_all)
        end_tokens = ctx.sampler.stops
        drafted_path = best_path(rows, end_tokens)
        state.length = len(drafted_path) - (drafted_path[-1][0] in end_tokens)
        if self.search:
            lattice_columns = build_lattice(rows[: budget - 1], end_tokens, self.mass, self.most)
            drafted_path = search_path(
                lattice_columns, end_tokens, self.beam, self.weight, causal_model(ctx, state)
            )
        node = 0
        for token, log_probability in drafted_path[: budget - 1]:
            value = tree.values[node] * math.exp(log_probability)
            node = tree.add(node, token, value=value, source="diffuspec")
            state.path.append(token)
            if ctx.ends(tree, node):
                break
        return tree

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        if state.path:
            agreed_count = 0
            for drafted_token, token in zip(state.path, step.tokens, strict=False):
                if drafted_token != token:
                    break
                agreed_count += 1
            self.follow_averages(state, state.length, agreed_count)

    def follow_averages(self, state: State, proposed: int, agreed: int) -> None:
        """Takes a draft into the moving averages, and says how many masks the next one has."""
        state.proposed += self.decay * (proposed - state.proposed)
        state.agreed += self.decay * (agreed - state.agreed)
        if self.adaptive:
            k = state.proposed + self.growth * (state.agreed >= state.proposed)
            state.k = min(max(math.floor(k), self.k_min), self.k_max)


def causal_model(ctx: Context, state: State) -> Causal:
    """The 3-gram distribution of a token after the text and some tokens of a path."""
    state.own.learn_tokens(ctx.tokens[state.counted :])
    state.counted = len(ctx.tokens)
    vocab = ctx.models["target"].vocab
    context_length = ORDER - 1
    text_tail = list(ctx.tokens[-context_length:])

    def law(path: Sequence[int], token: int) -> float:
        return token_probability(
            state.texts, [*text_tail, *path[-context_length:]][-context_length:], token, vocab
        )

    return law
