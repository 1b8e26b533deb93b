"""How a context is read once and asked many times: methods that the runner gives to the engine.

A context is one branch of a request, and each answer is a fork of it, which is dropped after the
answer; so what an answer wrote leaves no trace, and the rows of the context are computed once
however much is asked. Under a cache policy forks have copies of the policy as it follows the
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
from foretell.speculation.strategy import Strategy, verify_and_commit

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
    """The tokens of an answer. `first_s`: seconds from the question's arrival to its first token;
    `token_s`: a token after it, None where there is none.
    """

    tokens: list[int]
    first_s: float
    token_s: float | None
    usage: Held


@dataclass(frozen=True, eq=False)
class Questions(Strategy):
    """A method that asks about the prompt, which is the context; greedy answers, in `answers`.

    `golden` None: every question is asked by itself after the context and `head`, which is read
    before the questions are known. Else the questions are turns of one conversation, in which each
    is followed by the answer in `golden`, and the prompt has the first question in it.
    """

    head: Sequence[int]  # tokens between context and question
    questions: Sequence[Sequence[int]]
    max_tokens: int  # tokens of an answer
    golden: Sequence[Sequence[int]] | None = None
    answers: list[Answered] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)  # what reading the prompt took

    def run(self, ctx: Context) -> Steps:
        started_at = time.perf_counter()
        (text_branch,) = yield Fork(ctx.branch, quiet=True)
        if self.golden is None and self.head:
            yield Commit(list(self.head), NO_ROWS, text_branch)
        yield from compute_rows(ctx, text_branch)
        self.read_s.append(time.perf_counter() - started_at)
        for question_number, question in enumerate(self.questions):
            asked_at = time.perf_counter()
            if self.golden is None:
                (answer_branch,) = yield Fork(text_branch, quiet=True)
                yield Commit(list(question), NO_ROWS, answer_branch)
            else:
                if question_number:
                    next_turn = [*self.golden[question_number - 1], *self.head, *question]
                    yield Commit(next_turn, NO_ROWS, text_branch)
                    yield from compute_rows(ctx, text_branch)
                (answer_branch,) = yield Fork(text_branch, quiet=True)
            yield from self.write_answer(ctx.on(answer_branch), asked_at)
            yield Drop(answer_branch)
        yield Finish(ctx.branch)

    def write_answer(self, ctx: Context, asked_at: float) -> Generator[Message, Any, None]:
        """Writes an answer after the text of a branch that is dropped after it."""
        token_times = []
        output: list[int] = []
        while len(output) < self.max_tokens:
            tree = TokenTree(ctx.tokens[-1])
            reply = yield Ask(tree, branch=ctx.branch)
            _, outcome = yield from verify_and_commit(ctx, tree, reply)
            token_times.append(time.perf_counter())
            if outcome.tokens[0] in ctx.engine.eos:
                break
            output += outcome.tokens
            if ctx.request.text is not None and "\n" in ctx.request.text(output).lstrip("\n"):
                break
        later_count = len(token_times) - 1
        token_s = (token_times[-1] - token_times[0]) / later_count if later_count else None
        self.answers.append(
            Answered(output, token_times[0] - asked_at, token_s, cache_usage(ctx, ctx.branch))
        )


@dataclass(frozen=True, eq=False)
class Scored(Strategy):
    """A method that scores a text after the prompt: the bits of each of its tokens, in `bits`.

    Tokens are given, several to a forward where no rows change between them; so each is computed
    over the rows that plain decoding would have.
    """

    text: Sequence[int]
    bits: list[float] = field(default_factory=list)
    usages: list[Held] = field(default_factory=list)  # at the end

    def run(self, ctx: Context) -> Steps:
        (branch,) = yield Fork(ctx.branch, quiet=True)
        view = ctx.on(branch)
        prompt, policy = len(view.tokens), ctx.request.policy
        while len(self.bits) < len(self.text):
            length = len(view.tokens) - 1
            free_rows = NEVER if policy is None else policy.room_of(length, prompt)
            scored_count = len(self.bits)
            given_tokens = list(self.text[scored_count : scored_count + min(PIECE, free_rows)])
            tree = TokenTree(view.tokens[-1])
            node = 0
            for token in given_tokens[:-1]:
                node = tree.add(node, token)
            reply = yield Ask(tree, branch=branch, rows=range(len(tree)))
            log_probs = reply.logits.log_softmax(-1)
            token_logs = log_probs[range(len(given_tokens)), given_tokens]
            self.bits.extend((-token_logs / torch.tensor(2.0).log()).tolist())
            yield Commit(given_tokens, NO_ROWS, branch)
        self.usages.append(cache_usage(ctx, branch))
        yield Finish(ctx.branch)


def compute_rows(ctx: Context, branch: int) -> Generator[Message, Any, None]:
    """Computes the rows that a branch lacks of all its tokens but the last."""
    yield Ask(TokenTree(ctx.branches[branch].tokens[-1]), branch=branch, rows=())


def cache_usage(ctx: Context, branch: int) -> Held:
    """Measures what the target's cache of a branch holds of it now."""
    engine: Any = ctx.engine
    live = next(live for live in engine.live if live.ctx.request is ctx.request)
    cache = live.caches["target", branch]
    cache.settle(ctx.branches[branch].tokens)
    shared_rows = sum(len(segment.tokens) for segment in cache.segments)
    return Held(
        float(cache.base + shared_rows),
        float(cache.bytes + sum(segment.bytes for segment in cache.segments)),
    )
