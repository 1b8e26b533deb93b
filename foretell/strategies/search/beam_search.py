"""Groups of beams on the engine: a branch for each living beam, one forward a token for all.

Groups advance in turn; what an earlier one chose for a token costs the later ones something.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_options, refuse_source
from foretell.core.spending import REASON, Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Message, Reply, Steps
from foretell.speculation.strategy import Strategy
from foretell.strategies.log_probs import log_probs
from foretell.strategies.search.beams import Beam, Group

DRAWN = "nothing is drawn"
REFUSED = {
    "temperature": DRAWN,
    "top_k": DRAWN,
    "top_p": DRAWN,
    "min_p": DRAWN,
    "typical_p": DRAWN,
    "logprobs": "its answers have scores of their own, in Output.samples",
}
ReasonOf = Callable[[tuple[int, ...]], str | None]  # why a text ends; None: it goes on
Branches = dict[Beam, int]  # of the living beams of a group


def refuse_for_search(name: str, ctx: Context) -> None:
    """Raises BadConfig for what a search cannot honour."""
    refuse_options(name, ctx.request.sampling, REFUSED)
    refuse_source(name, ctx.request)


class Beams(Strategy):
    """The base of strategies that have `width` beams in all, beside the request's own branch."""

    width: int

    @property
    def most_texts(self) -> int:
        return 1 + self.width


def search_beams(ctx: Context, groups: Sequence[Group], diversity: float) -> Steps:
    """Runs all groups to their ends; the best text of all is the answer, by its own probability."""
    remaining_tokens = ctx.limit - len(ctx.tokens)  # tokens

    def reason_of(tokens: tuple[int, ...]) -> str | None:
        return ctx.sampler.reason(tokens, remaining_tokens)

    try:
        yield from grow_beams(ctx, groups, diversity, reason_of)
    except Spent:
        yield from commit_best_text(ctx, groups, allow_unfinished=True)
    else:
        yield from commit_best_text(ctx, groups)


def grow_beams(
    ctx: Context, groups: Sequence[Group], diversity: float, reason_of: ReasonOf
) -> Generator[Message, Any, None]:
    """Runs the groups to their ends."""
    first_reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch)
    vocab_size = first_reply.logits.shape[-1]
    root_beam = groups[0].living_beams[0]
    group_log_probs = [
        {root_beam: log_probs(ctx, first_reply.logits[0], root_beam.tokens)} for _ in groups
    ]
    branches: list[Branches] = [{root_beam: ctx.branch} for _ in groups]
    while True:
        token_costs = first_reply.logits.new_zeros(vocab_size) if diversity else None
        for group_index, group in enumerate(groups):
            if group.is_over:
                continue
            candidate_count = max(2, 1 + len(ctx.sampler.stops)) * group.width
            continuing_pairs = group.advance(
                group_log_probs[group_index], candidate_count, reason_of, token_costs
            )
            if token_costs is not None:
                for token in group.chosen_tokens:
                    token_costs[token] += diversity
            if group.is_over:
                continuing_pairs = []
            branches[group_index] = yield from move_branches(
                ctx, branches[group_index], continuing_pairs
            )
        living_beams = [
            (group_index, beam)
            for group_index, group_branches in enumerate(branches)
            for beam in group_branches
        ]
        if not living_beams:
            break
        asks = [
            Ask(TokenTree(beam.tokens[-1]), branch=branches[index][beam])
            for index, beam in living_beams
        ]
        replies: list[Reply] = yield asks
        group_log_probs = [{} for _ in groups]
        for (group_index, beam), first_reply in zip(living_beams, replies, strict=True):
            group_log_probs[group_index][beam] = log_probs(ctx, first_reply.logits[0], beam.tokens)


def move_branches(
    ctx: Context, branches: Branches, continuing_pairs: Sequence[tuple[Beam, Beam]]
) -> Generator[Message, Any, Branches]:
    """Brings the branches of a group from its old beams to the new ones, (parent, beam).

    A beam's first child takes its branch over; further ones get copies. The request's own branch
    stays as it is.
    """
    new_branches: Branches = {}
    surviving_parents = {parent for parent, _ in continuing_pairs}
    for parent, branch in branches.items():  # first of all: there are never more than beams
        if parent not in surviving_parents and branch != ctx.branch:
            yield Drop(branch)
    for parent, branch in branches.items():
        children = [beam for old_beam, beam in continuing_pairs if old_beam == parent]
        is_request_branch = branch == ctx.branch
        copy_count = len(children) if is_request_branch else len(children) - 1
        child_branches: list[int] = [] if is_request_branch else [branch]
        if copy_count > 0:
            child_branches += yield Fork(branch, copy_count)
        for beam, child_branch in zip(children, child_branches, strict=False):
            yield Commit([beam.tokens[-1]], torch.empty(0), child_branch)
            new_branches[beam] = child_branch
    return {beam: new_branches[beam] for _, beam in continuing_pairs}


def commit_best_text(
    ctx: Context, groups: Sequence[Group], allow_unfinished: bool = False
) -> Steps:
    """Commits the best text, and tells of all.

    `allow_unfinished`: where none has ended, those that have not.
    """
    scored_texts = []
    for group in groups:
        for ended_beam in group.ended_beams:
            tokens = list(ended_beam.beam.tokens)
            scored_texts.append(
                (tokens, ended_beam.beam.logprob / len(tokens) ** group.penalty, ended_beam.reason)
            )
    if allow_unfinished and not scored_texts:
        for group in groups:
            for beam in group.living_beams:
                tokens = list(beam.tokens)
                scored_texts.append(
                    (tokens, beam.logprob / max(len(tokens), 1) ** group.penalty, REASON)
                )
    scored_texts.sort(key=lambda text: -text[1])
    tokens, _, reason = scored_texts[0]
    if tokens:
        yield Commit(tokens, torch.empty(0), ctx.branch, ["target"] * len(tokens))
    yield Finish(ctx.branch, reason, scored_texts)
