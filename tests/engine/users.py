"""Small users of the heart's mechanisms, each with what it should give, worked out by plain loops.

Sources: `Guidance` reads a second prompt, `Contrast` a second model. Strategies: `BestOf` writes
several texts side by side and lets another model judge them, `Ahead` drafts while the target
verifies, `Consulting` asks slow functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Reading
from foretell.core.model import Model
from foretell.core.source import Nodes, Source, follow_text
from foretell.core.tree import TokenTree
from foretell.core.types import (
    Ask,
    Call,
    Commit,
    Drop,
    Finish,
    Fork,
    Kept,
    Message,
    Open,
    Reply,
    Steps,
    Together,
)
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.testing.toy import Toy
from tests import laws


def log_softmax(row: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in row))
    return [x - total for x in row]


def mixed(first: Sequence[float], second: Sequence[float], scale: float) -> list[float]:
    """second + scale (first - second), of log-probabilities."""
    pairs = zip(log_softmax(first), log_softmax(second), strict=True)
    return [b + scale * (a - b) for a, b in pairs]


def mix(first: torch.Tensor, second: torch.Tensor, scale: float) -> torch.Tensor:
    a, b = first.log_softmax(-1), second.log_softmax(-1)
    return b + scale * (a - b)


@dataclass(frozen=True)
class Guidance(Source):
    """Classifier-free guidance: away from what the target says after another prompt."""

    prompt: tuple[int, ...] = (1, 1)
    scale: float = 1.5

    def start(self, ctx: Context) -> Generator[Message, Any, tuple[int, int]]:
        branch = yield Open(self.prompt)
        return branch, len(ctx.tokens)

    def read_rows(
        self,
        ctx: Context,
        state: tuple[int, int],
        tree: TokenTree,
        taps: Sequence[int],
        nodes: Nodes = None,
    ) -> Reading:
        branch, start = state
        yield from follow_text(ctx, branch, start)
        quiet = tree.reroot_at(ctx.on(branch).tokens[-1])
        asks = [
            Ask(tree, branch=ctx.branch, rows=nodes, taps=tuple(taps)),
            Ask(quiet, branch=branch, rows=nodes),
        ]
        with_prompt, without = yield asks
        return replace(with_prompt, logits=mix(with_prompt.logits, without.logits, self.scale))

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        toy = models["target"]
        assert isinstance(toy, Toy)

        def after(output: Sequence[int]) -> list[float]:
            first = laws.row(toy, [*prompt, *output])
            return mixed(first, laws.row(toy, [*self.prompt, *output]), self.scale)

        return after


@dataclass(frozen=True)
class Contrast(Source):
    """Contrastive decoding: away from what a weaker model says of the same text."""

    scale: float = 1.3
    models = ("amateur",)

    def read_rows(
        self, ctx: Context, state: None, tree: TokenTree, taps: Sequence[int], nodes: Nodes = None
    ) -> Reading:
        target = Ask(tree, branch=ctx.branch, rows=nodes, taps=tuple(taps))
        strong, weak = yield [target, Ask(tree, "amateur", ctx.branch, rows=nodes)]
        return replace(strong, logits=mix(strong.logits, weak.logits, self.scale))

    def rows(self, models: Mapping[str, Model], prompt: Sequence[int]) -> laws.Rows:
        target, amateur = models["target"], models["amateur"]
        assert isinstance(target, Toy) and isinstance(amateur, Toy)

        def after(output: Sequence[int]) -> list[float]:
            text = [*prompt, *output]
            return mixed(laws.row(target, text), laws.row(amateur, text), self.scale)

        return after


# --- strategies that write several texts


@dataclass(frozen=True)
class BestOf(Strategy):
    """`n` texts side by side; a judge reads each after a question; the best is the result.

    The judge's score of a text is the logit of `yes` after `question` and the text.
    """

    writer: Strategy
    n: int = 2
    question: tuple[int, ...] = (2, 0)
    yes: int = 1

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.writer.models, "judge")

    def run(self, ctx: Context) -> Steps:
        more = yield Fork(0, self.n - 1)
        texts = [0, *more]
        scores = yield Together([self.write(ctx.on(branch)) for branch in texts])
        best = max(range(self.n), key=lambda i: (scores[i], -i))
        for branch in texts:
            if branch != texts[best]:
                yield Drop(branch)
        answers = [(list(ctx.on(texts[best]).output), scores[best], "length")]
        yield Finish(texts[best], "length", answers)

    def write(self, ctx: Context) -> Steps:
        yield from self.writer.run(ctx)
        read = [*self.question, *ctx.output]
        branch = yield Open(read, "judge")
        reply = yield Ask(TokenTree(read[-1]), "judge", branch)
        yield Drop(branch)
        return float(reply.logits[0, self.yes])


def judged(models: Mapping[str, Model], best_of: BestOf, output: Sequence[int]) -> float:
    judge = models["judge"]
    assert isinstance(judge, Toy)
    return laws.row(judge, [*best_of.question, *output])[best_of.yes]


# --- strategies that do two things at once


@dataclass(frozen=True)
class Ahead(Strategy):
    """While the target verifies a chain, the draft model goes on after it.

    If the whole chain is accepted and the target's next token is the first of what was drafted
    meanwhile, the rest of that is the next chain; else nothing was won. Greedy.
    """

    length: int = 2
    models = ("draft",)

    def run(self, ctx: Context) -> Steps:
        drafted: list[int] = []
        while True:
            tree = TokenTree(ctx.tokens[-1]).chain(drafted[: ctx.depth], "draft")
            reply, ahead = yield Together([self.verify(ctx, tree), self.roll(ctx, tree)])
            outcome, kept = yield from verify_and_commit(ctx, tree, reply)
            if kept.reason:
                return
            whole = len(outcome.path) == len(tree) - 1
            drafted = ahead[1:] if whole and outcome.token == ahead[0] else []

    @staticmethod
    def verify(ctx: Context, tree: TokenTree) -> Steps:
        reply: Reply = yield Ask(tree, branch=ctx.branch)
        return reply

    def roll(self, ctx: Context, tree: TokenTree) -> Steps:
        chain = TokenTree(tree.tokens[0]).chain(tree.tokens[1:])
        rolled = []
        for _ in range(1 + self.length):
            reply = yield Ask(chain, "draft", ctx.branch, rows=[len(chain) - 1])
            rolled.append(int(reply.logits[0].argmax()))
            chain.add(len(chain) - 1, rolled[-1])
        return rolled


@dataclass(frozen=True)
class Consulting(Strategy):
    """Asks a slow function for every other token, the target for the rest."""

    function: Callable[[list[int]], int]

    def run(self, ctx: Context) -> Steps:
        while True:
            text = list(ctx.tokens)
            token = yield Call(partial(self.function, text))
            kept: Kept = yield Commit([token], torch.zeros(1, 8), ctx.branch, ["tool"])
            if kept.reason:
                return
            reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch)
            _, kept = yield from verify_and_commit(ctx, TokenTree(ctx.tokens[-1]), reply)
            if kept.reason:
                return


@dataclass(frozen=True)
class Wise(Drafter):
    """Drafts what a model of its own says is best."""

    length: int = 2
    models = ("wise",)
    made: Callable[[], None] = lambda: None

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        self.made()
        return {"wise": Toy(models["target"].vocab, 3, noise=0.3, copy=0.5, name="wise")}

    def steps(self, ctx: Context, state: Any, budget: int) -> Any:
        tree = TokenTree(ctx.tokens[-1])
        for _ in range(min(self.length, ctx.depth, budget - 1)):
            reply = yield Ask(tree, "wise", ctx.branch, rows=[len(tree) - 1])
            tree.add(len(tree) - 1, int(reply.logits[0].argmax()), source="wise")
        return tree
