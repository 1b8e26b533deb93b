"""PG-TD: a tree search over tokens finds the program that its tests value most.

Each rollout goes down a tree of tokens, in which every text has its `k` likeliest next tokens as
children. At each text it takes the child with the highest Q + c(N) P sqrt(ln N) / (1 + n): Q is the
best reward found behind the child, P the model's chance for it among the k, n and N say how often
the child and the text were passed, and c(N) = ln((N + base + 1) / base) + c. The first text that is
new is finished greedily, the reward of the whole is what the rollout found, and all texts on the
way remember the best of it. The answer is the text of the highest reward, the first of equal ones.
Only few rollouts compute anything anew: a finished text is that of all its beginnings as well, and
the rows behind its tokens are kept for the texts that begin there, as is its reward.

Paper: Zhang et al., Planning with Large Language Models for Code Generation, arXiv:2303.05510
Guarantee: lossy: the reward decides beside the model, on purpose
Cost: target 1
Needs: a reward, such as `tests`, see `foretell methods`; a tokenizer
Trains: nothing
Try: --method pg-td --reward tests:path=FILE.jsonl
Differs:
- texts are finished greedily; the paper's code may also take the best of several beams, or samples
- any reward of whole texts serves, and with `enough` the search ends once one is as good as that
- 16 rollouts are the released code's example, the paper's tables have up to 256
- no drafter is asked: the rows behind all tokens of a text are needed for the tree
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.spending import Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Kept, Message, Reply, Steps
from foretell.errors import BadConfig
from foretell.rewards.base import Reward, needs_text, scored
from foretell.speculation.strategy import Strategy
from foretell.strategies.beam.beam_search import refuse
from foretell.strategies.beam.ucb import Node, Text, children, down, up
from foretell.strategies.log_probs import log_probs

Firsts = list[tuple[int, float]]  # the likeliest next tokens, each with its chance among them


@dataclass(frozen=True)
class PgTd(Strategy):
    """With rollouts=1 it is greedy decoding."""

    reward: Reward | None = None  # what whole texts are worth; there must be one
    rollouts: int = 16  # ways down the tree
    k: int = 3  # next tokens of a text
    c: float = 4.0  # how much the model's chances count beside rewards
    base: float = 10.0  # the larger, the later they count more for texts that were passed often
    enough: float = 0.0  # reward that ends the search: 1 where all tests pass; 0: none
    cache: bool = True  # whether finished texts, rows and rewards are kept, which changes no answer

    draws = False

    def __post_init__(self) -> None:
        if self.reward is None:
            raise BadConfig("pg-td: needs a reward; give one, as in reward=tests:path=tests.jsonl")
        for name, most in (("rollouts", 100_000), ("k", 64)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise BadConfig.field(f"pg-td:{name}", value, f"between 1 and {most}")
        if not 0 <= self.c <= 1e6:
            raise BadConfig.field("pg-td:c", self.c, "between 0 and 1000000")
        if not 0 < self.base <= 1e9:
            raise BadConfig.field("pg-td:base", self.base, "above 0, and at most 1000000000")
        if math.isnan(self.enough):
            raise BadConfig.field("pg-td:enough", self.enough, "a number")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        refuse("pg-td", ctx)
        needs_text("pg-td", ctx, self.reward)
        return self._steps(ctx)

    def _steps(self, ctx: Context) -> Steps:
        found: dict[Text, Found] = {}
        try:
            yield from self.search(ctx, found)
        except Spent:
            if not found:
                raise
        order = sorted(found.items(), key=lambda one: -one[1].reward)  # the older of equal ones
        for branch in [branch for branch in ctx.branches if branch != ctx.branch]:
            yield Drop(branch)
        best, first = order[0]
        yield Commit(list(best), torch.empty(0), ctx.branch, ["target"] * len(best))
        answers = [(list(text), one.reward, one.reason) for text, one in order]
        yield Finish(ctx.branch, first.reason, answers)

    def search(self, ctx: Context, found: dict[Text, Found]) -> Steps:
        """Runs the rollouts. `found`: every finished text, in the order in which they were."""
        reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch)
        root = Node((), children(likeliest(ctx, reply.logits[0], (), self.k)))
        written: list[Written] = []
        for _ in range(self.rollouts):
            path, node = down(root, self.c, self.base)
            if node is None:
                edge = path[-1][1]
                edge.node = node = Node((*path[-1][0].text, edge.token))
                whole = yield from self.finished(ctx, node, written)
                if not (self.cache and whole in found):
                    reward = yield from self.value(ctx, whole)
                    found.setdefault(whole, Found(reward, str(reason_of(ctx, whole))))
                node.best = whole
            up(path, node, found[node.best].reward)
            if self.enough and found[node.best].reward >= self.enough:
                return

    def value(self, ctx: Context, text: Text) -> Generator[Message, Any, float]:
        assert self.reward is not None, "refused when it was made"
        (value,) = yield from scored(ctx, self.reward, [text])
        return value

    def finished(
        self, ctx: Context, node: Node, written: list[Written]
    ) -> Generator[Message, Any, Text]:
        """The whole text that begins with a new node's, which gets its children."""
        text = node.text
        if reason_of(ctx, text):
            return text
        known = [one for one in written if one.text[: len(text)] == text]
        whole = known[0] if known else (yield from self.write(ctx, text))
        if self.cache and not known:
            written.append(whole)
        node.edges = children(whole.firsts[len(text) - whole.start])
        return whole.text

    def write(self, ctx: Context, text: Text) -> Generator[Message, Any, Written]:
        """Goes on with a text greedily until it ends, on a branch of its own."""
        (branch,) = yield Fork(ctx.branch, 1)
        view = ctx.on(branch)
        yield Commit(list(text), torch.empty(0), branch)
        firsts: list[Firsts] = []
        reason = None
        while reason is None:
            reply: Reply = yield Ask(TokenTree(view.tokens[-1]), branch=branch)
            firsts.append(likeliest(view, reply.logits[0], view.output, self.k))
            kept: Kept = yield Commit([firsts[-1][0][0]], reply.logits, branch, ["target"])
            reason = kept.reason
        whole = Written(tuple(view.output), len(text), firsts)
        yield Drop(branch)
        return whole


@dataclass(frozen=True)
class Found:
    """What a finished text is worth, and why it ended."""

    reward: float
    reason: str


@dataclass(frozen=True)
class Written:
    """A finished text, and the likeliest tokens behind each of its beginnings from `start` on."""

    text: Text
    start: int
    firsts: list[Firsts]


def likeliest(ctx: Context, row: torch.Tensor, text: Text | list[int], k: int) -> Firsts:
    """The k best tokens of the row (V,) behind a text, of equal ones the lowest first."""
    logs = log_probs(ctx, row, text)
    least = logs.topk(min(k, len(logs))).values[-1]
    tokens = ((logs >= least) & (logs > -math.inf)).nonzero()[:, 0]
    pairs = zip(tokens.tolist(), logs[tokens].tolist(), strict=True)
    best = sorted(pairs, key=lambda pair: -pair[1])[:k]
    total = sum(math.exp(value) for _, value in best)
    return [(token, math.exp(value) / total) for token, value in best]


def reason_of(ctx: Context, text: Text) -> str | None:
    """Why a text has ended, if it has."""
    return ctx.sampler.reason(text, ctx.limit - len(ctx.tokens))
