"""How a context is read once and asked many times: methods that the runner gives to the engine.

A context is one branch of a request, and each answer is a fork of it, which is dropped behind the
answer; so what an answer wrote leaves no trace, and the rows of the context are computed once
however much is asked. Under a cache policy forks have copies of the policy as it stands behind the
context: rows that were given up before the question are given up for all questions.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.cache.policy import NEVER
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Message, Steps
from foretell.speculation.strategy import Strategy, settle

PIECE = 64  # tokens of a text that are scored by one forward at most
NO_ROWS = torch.empty(0)


@dataclass
class Held:
    """Rows of a cache, shared ones included, and the memory of these and of what its policy holds
    beside them.
    """

    rows: float
    bytes: float


@dataclass
class Answered:
    """`first_s`: seconds from the question's arrival to the first token of the answer; `token_s`:
    a token behind it, None where there is none.
    """

    tokens: list[int]
    first_s: float
    token_s: float | None
    held: Held


@dataclass(frozen=True, eq=False)
class Questions(Strategy):
    """Asks about the prompt, which is the context; greedy answers, in `answers`.

    `golden` None: every question is asked by itself behind the context and `head`, which is read
    before the questions are known. Else the questions are turns of one conversation, in which each
    is followed by the answer in `golden`, and the prompt has the first question in it.
    """

    head: Sequence[int]  # tokens between context and question
    questions: Sequence[Sequence[int]]
    most: int  # tokens of an answer
    golden: Sequence[Sequence[int]] | None = None
    answers: list[Answered] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)  # what reading the prompt took

    def run(self, ctx: Context) -> Steps:
        begun = time.perf_counter()
        (text,) = yield Fork(ctx.branch, quiet=True)
        if self.golden is None and self.head:
            yield Commit(list(self.head), NO_ROWS, text)
        yield from taken_in(ctx, text)
        self.read_s.append(time.perf_counter() - begun)
        for number, question in enumerate(self.questions):
            asked = time.perf_counter()
            if self.golden is None:
                (own,) = yield Fork(text, quiet=True)
                yield Commit(list(question), NO_ROWS, own)
            else:
                if number:
                    before = [*self.golden[number - 1], *self.head, *question]
                    yield Commit(before, NO_ROWS, text)
                    yield from taken_in(ctx, text)
                (own,) = yield Fork(text, quiet=True)
            yield from self.answer(ctx.on(own), asked)
            yield Drop(own)
        yield Finish(ctx.branch)

    def answer(self, ctx: Context, asked: float) -> Generator[Message, Any, None]:
        """Writes an answer behind the text of a branch that is dropped after it."""
        times = []
        output: list[int] = []
        while len(output) < self.most:
            tree = TokenTree(ctx.tokens[-1])
            reply = yield Ask(tree, branch=ctx.branch)
            _, kept = yield from settle(ctx, tree, reply)
            times.append(time.perf_counter())
            if kept.tokens[0] in ctx.engine.eos:
                break
            output += kept.tokens
            if ctx.request.text is not None and "\n" in ctx.request.text(output).lstrip("\n"):
                break
        later = len(times) - 1
        token_s = (times[-1] - times[0]) / later if later else None
        self.answers.append(Answered(output, times[0] - asked, token_s, held(ctx, ctx.branch)))


@dataclass(frozen=True, eq=False)
class Scored(Strategy):
    """What a text costs behind the prompt: of each of its tokens the bits, in `bits`.

    Tokens are given, several to a forward where no rows change between them; so each is computed
    over the rows that plain decoding would have.
    """

    text: Sequence[int]
    bits: list[float] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)  # at the end

    def run(self, ctx: Context) -> Steps:
        (branch,) = yield Fork(ctx.branch, quiet=True)
        view = ctx.on(branch)
        prompt, policy = len(view.tokens), ctx.request.policy
        while len(self.bits) < len(self.text):
            length = len(view.tokens) - 1
            room = NEVER if policy is None else policy.room_of(length, prompt)
            done = len(self.bits)
            given = list(self.text[done : done + min(PIECE, room)])
            tree = TokenTree(view.tokens[-1])
            node = 0
            for token in given[:-1]:
                node = tree.add(node, token)
            reply = yield Ask(tree, branch=branch, rows=range(len(tree)))
            laws = reply.logits.log_softmax(-1)
            chances = laws[range(len(given)), given]
            self.bits.extend((-chances / torch.tensor(2.0).log()).tolist())
            yield Commit(given, NO_ROWS, branch)
        self.held.append(held(ctx, branch))
        yield Finish(ctx.branch)


def taken_in(ctx: Context, branch: int) -> Generator[Message, Any, None]:
    """Computes the rows that a branch lacks of all its tokens but the last."""
    yield Ask(TokenTree(ctx.branches[branch].tokens[-1]), branch=branch, rows=())


def held(ctx: Context, branch: int) -> Held:
    """What the target's cache of a branch holds of it now."""
    engine: Any = ctx.engine
    live = next(live for live in engine.live if live.ctx.request is ctx.request)
    cache = live.caches["target", branch]
    cache.settle(ctx.branches[branch].tokens)
    shared = sum(len(segment.tokens) for segment in cache.segments)
    return Held(
        float(cache.base + shared),
        float(cache.bytes + sum(segment.bytes for segment in cache.segments)),
    )
