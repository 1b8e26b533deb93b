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
from foretell.strategies.beam.beams import Beam, Group
from foretell.strategies.log_probs import log_probs

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


def refuse(name: str, ctx: Context) -> None:
    """Raises BadConfig for what a search cannot honour."""
    refuse_options(name, ctx.request.sampling, REFUSED)
    refuse_source(name, ctx.request)


class Beams(Strategy):
    """The base of strategies that have `width` beams in all, beside the request's own branch."""

    width: int

    @property
    def most_texts(self) -> int:
        return 1 + self.width


def search(ctx: Context, groups: Sequence[Group], diversity: float) -> Steps:
    """Runs all groups to their ends; the best text of all is the answer, by its own probability."""
    room = ctx.limit - len(ctx.tokens)  # tokens

    def reason_of(tokens: tuple[int, ...]) -> str | None:
        return ctx.sampler.reason(tokens, room)

    try:
        yield from grown(ctx, groups, diversity, reason_of)
    except Spent:
        yield from answered(ctx, groups, unfinished=True)
    else:
        yield from answered(ctx, groups)


def grown(
    ctx: Context, groups: Sequence[Group], diversity: float, reason_of: ReasonOf
) -> Generator[Message, Any, None]:
    """Runs the groups to their ends."""
    reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch)
    vocab = reply.logits.shape[-1]
    root = groups[0].alive[0]
    laws = [{root: log_probs(ctx, reply.logits[0], root.tokens)} for _ in groups]
    branches: list[Branches] = [{root: ctx.branch} for _ in groups]
    while True:
        taken = reply.logits.new_zeros(vocab) if diversity else None
        for place, group in enumerate(groups):
            if group.over:
                continue
            wide = max(2, 1 + len(ctx.sampler.stops)) * group.width
            going = group.advance(laws[place], wide, reason_of, taken)
            if taken is not None:
                for token in group.chosen:
                    taken[token] += diversity
            if group.over:
                going = []
            branches[place] = yield from moved(ctx, branches[place], going)
        living = [(place, beam) for place, held in enumerate(branches) for beam in held]
        if not living:
            break
        asks = [Ask(TokenTree(beam.tokens[-1]), branch=branches[i][beam]) for i, beam in living]
        replies: list[Reply] = yield asks
        laws = [{} for _ in groups]
        for (place, beam), reply in zip(living, replies, strict=True):
            laws[place][beam] = log_probs(ctx, reply.logits[0], beam.tokens)


def moved(
    ctx: Context, branches: Branches, going: Sequence[tuple[Beam, Beam]]
) -> Generator[Message, Any, Branches]:
    """Brings the branches of a group from its old beams to the new ones, (parent, beam).

    A beam's first child takes its branch over; further ones get copies. The request's own branch
    stays as it is.
    """
    found: Branches = {}
    parents = {parent for parent, _ in going}
    for parent, branch in branches.items():  # first of all: there are never more than beams
        if parent not in parents and branch != ctx.branch:
            yield Drop(branch)
    for parent, branch in branches.items():
        children = [beam for old, beam in going if old == parent]
        own = branch == ctx.branch
        copies = len(children) if own else len(children) - 1
        handles: list[int] = [] if own else [branch]
        if copies > 0:
            handles += yield Fork(branch, copies)
        for beam, handle in zip(children, handles, strict=False):
            yield Commit([beam.tokens[-1]], torch.empty(0), handle)
            found[beam] = handle
    return {beam: found[beam] for _, beam in going}


def answered(ctx: Context, groups: Sequence[Group], unfinished: bool = False) -> Steps:
    """Commits the best text, and tells of all.

    `unfinished`: where none has ended, those that have not.
    """
    texts = []
    for group in groups:
        for ended in group.ended:
            tokens = list(ended.beam.tokens)
            texts.append((tokens, ended.beam.logprob / len(tokens) ** group.penalty, ended.reason))
    if unfinished and not texts:
        for group in groups:
            for beam in group.alive:
                tokens = list(beam.tokens)
                texts.append((tokens, beam.logprob / max(len(tokens), 1) ** group.penalty, REASON))
    texts.sort(key=lambda text: -text[1])
    tokens, _, reason = texts[0]
    if tokens:
        yield Commit(tokens, torch.empty(0), ctx.branch, ["target"] * len(tokens))
    yield Finish(ctx.branch, reason, texts)
