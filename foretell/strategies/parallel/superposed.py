"""Writes k drafts of a completion at the cost of one: their newest tokens are one mixed input.

The model reads a weighted sum of the embeddings of the drafts' newest tokens. One forward a step
and one chain of rows serve all drafts. Its logits, and for each draft counts of n-grams, score the
drafts' continuations; the best 2k of them are looked at, those that end are set aside, the best k
others live on, and the embeddings of their newest tokens, weighted by the softmax of the drafts'
scores, are summed to the next input. The result is the best draft, all of them with their scores
are in `Output.samples`; which is the best is known at the end only, so nothing is streamed before.
Rows of such sums belong to no token and end with the request. Penalties, bans and processors act on
each draft's own text. Counts come from the prompt, from a corpus, and with megabytes=64 from texts
finished before too; then an answer may depend on what was answered before. With reset=s the best
draft alone goes on every s tokens, with rows of its own, and divides into k anew. With opening=n
the drafts go on from n tokens that were drawn by nucleus sampling.

Paper: Shen et al., Superposed Decoding: Multiple Generations from a Single Autoregressive Inference
Pass, arXiv:2405.18400
Guarantee: lossy: from the second token on the model reads sums of embeddings, and counts of n-grams
weigh in
Cost: target 1
Needs: a model whose layers can be entered
Trains: nothing
Differs:
- n-grams are counted in the prompt and, if asked, in a corpus and in what this engine and tenant
has finished, the latest 4096 places of a token, where the paper counts in 200,000 documents
- what the weights of the contexts found leave of 1 (at least half) is the model's own share of the
n-gram law, since few counts would else force copies; backoff=false is the paper's rule
- an end counts among the k best continuations only, so that k=1 with alpha=0 is greedy decoding
- it stops when no living draft can still become one of the k best
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_options, refuse_policy, refuse_source
from foretell.core.spending import REASON, Spent
from foretell.core.text import TokenIds, check_ids
from foretell.core.tree import TokenTree
from foretell.core.types import (
    Ask,
    Commit,
    Drop,
    Finish,
    Fork,
    Message,
    Reply,
    Steps,
)
from foretell.errors import BadConfig
from foretell.speculation.strategy import Strategy
from foretell.strategies.parallel.superposing import (
    WEIGHTS,
    Draft,
    drawn_opening,
    likeliest,
    mixed_scores,
    mixture,
    superpose,
)
from foretell.strategies.parallel.text_counts import LARGEST, TextCounts, count_in, counts_of

MIXED = -1  # the token of a node whose state is a sum
REFUSED = {
    "temperature": "nothing is drawn; superposed:temperature=0.06 shapes the law instead",
    "top_k": "the method has a field for it; give superposed:m=9",
    "top_p": "nothing is drawn",
    "min_p": "nothing is drawn",
    "typical_p": "nothing is drawn",
    "logprobs": "its rows belong to several texts at once",
}


@dataclass(frozen=True)
class Superposed(Strategy):
    """The paper takes temperature=0.12 and m=30 for k=10."""

    k: int = 3  # drafts
    m: int = 9  # tokens of a row that may follow, the best
    temperature: float = 0.06  # of the model's law; not 0
    # what the n-grams' law counts in a score, the model's 1 - alpha; 0: no n-grams
    alpha: float = 0.54
    # the n-grams' law keeps a share of the model's; no: only what was counted may follow
    backoff: bool = True
    megabytes: int = 0  # of finished texts that n-grams are counted in too; 0: of none
    corpus: TokenIds = ()  # a text that n-grams are counted in too
    reset: int = 0  # tokens after which the best draft alone goes on, and divides anew; 0: never
    opening: int = 0  # first tokens that are drawn by nucleus sampling
    nucleus: float = 0.9  # probability of what these are drawn from

    needs = ("layers",)
    draws = False

    def __post_init__(self) -> None:
        ranges = {
            "k": (1, 64),
            "m": (1, 1024),
            "temperature": (0.001, 100),
            "alpha": (0, 1),
            "megabytes": (0, LARGEST),
            "reset": (0, 1 << 20),
            "opening": (0, 1 << 20),
            "nucleus": (1e-6, 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"superposed:{name}", value, f"between {low} and {high}")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for what cannot be honoured."""
        refuse_options("superposed", ctx.request.sampling, REFUSED)
        refuse_source("superposed", ctx.request)
        refuse_policy("superposed", ctx.request)
        check_ids("superposed:corpus", self.corpus, ctx.models["target"].vocab)
        return self._steps(ctx)

    def _steps(self, ctx: Context) -> Steps:
        prompt, texts = list(ctx.tokens), self._texts(ctx)
        room = ctx.limit - len(prompt)  # tokens
        opening = yield from drawn_opening(ctx, min(self.opening, room), self.nucleus)
        alive, done = [Draft(0.0, opening)], list[Draft]()
        if opening and ctx.sampler.ended(opening):
            alive, done = done, alive
        cut = "length"
        try:
            while not self.over(alive, done, room):
                alive, done = yield from self._stretch(ctx, texts, alive[0], done, room)
        except Spent:
            cut = REASON
        answers = [(draft.tokens, draft.score, "stop") for draft in done]
        answers += [(draft.tokens, draft.score, cut) for draft in alive]
        answers = sorted(answers, key=lambda one: -one[1])[: self.k]
        tokens, _, reason = answers[0]
        yield Commit(tokens, torch.empty(0), sources=["target"] * len(tokens))
        if self.megabytes and self.alpha:
            texts[-1].add([*prompt, *tokens])
        yield Finish(0, reason, answers)

    def _texts(self, ctx: Context) -> list[TextCounts]:
        """What n-grams are counted in; last, if there is one, the store of finished texts."""
        texts = [counts_of(ctx.tokens)]
        if self.corpus:
            texts.append(ctx.shared(lambda: counts_of(self.corpus), "corpus"))
        if self.megabytes and self.alpha:
            texts.append(ctx.shared(lambda: TextCounts(self.megabytes)))
        return texts

    def over(self, alive: Sequence[Draft], done: Sequence[Draft], room: int) -> bool:
        """Whether there is no draft to go on with, or none that could still be among the k best."""
        settled = len(done) == self.k and bool(alive) and done[-1].score >= alive[0].score
        return not alive or settled or len(alive[0].tokens) >= room

    def _stretch(
        self, ctx: Context, texts: Sequence[TextCounts], start: Draft, done: list[Draft], room: int
    ) -> Generator[Message, Any, tuple[list[Draft], list[Draft]]]:
        """Goes on from one draft, until the end or the next reset; returns the living drafts and
        the ended ones.
        """
        model = ctx.models["target"]
        branch = ctx.branch
        if start.tokens:  # what was mixed is forgotten: this draft's own rows are computed
            (branch,) = yield Fork(ctx.branch, quiet=True)
            yield Commit(start.tokens, torch.empty(0), branch)
        tree = TokenTree(ctx.branches[branch].tokens[-1])
        alive = [start]
        reply: Reply = yield Ask(tree, branch=branch)
        while True:
            alive, done = self.extend(ctx, texts, reply.logits[0], alive, done)
            if self.over(alive, done, room) or len(tree) == self.reset:
                break
            shares = mixture(alive)
            tree.add(len(tree) - 1, MIXED, value=1.0)
            states = superpose(model.embed(list(shares)), list(shares.values()))
            reply = yield Ask(tree, branch=branch, states=states)
        if branch != ctx.branch:
            yield Drop(branch)
        return alive, done

    def extend(
        self,
        ctx: Context,
        texts: Sequence[TextCounts],
        row: torch.Tensor,
        alive: Sequence[Draft],
        done: Sequence[Draft],
    ) -> tuple[list[Draft], list[Draft]]:
        """The k best drafts that go on behind row (V,), and the k best that have ended; both best
        first.
        """
        options: list[tuple[float, int, int]] = []  # (score, place among the living, token)
        for place, draft in enumerate(alive):
            if place == 0 or not ctx.sampler.plain:
                ids, logs = likeliest(
                    ctx.sampler.scores(row, draft.tokens), self.m, self.temperature
                )
            scores = logs
            if self.alpha:
                context = [*ctx.tokens[-len(WEIGHTS) :], *draft.tokens[-len(WEIGHTS) :]]
                hits, totals = count_in(texts, context, ids, len(WEIGHTS))
                scores = mixed_scores(logs, hits, totals, self.alpha, self.backoff)
            for score, token in zip(scores.tolist(), ids.tolist(), strict=True):
                if score > -math.inf:
                    options.append((draft.score + score, place, token))
        options.sort(key=lambda option: -option[0])
        going: list[Draft] = []
        ended = list(done)
        for rank, (score, place, token) in enumerate(options[: 2 * self.k]):
            draft = Draft(score, [*alive[place].tokens, token])
            if not ctx.sampler.ended(draft.tokens):
                going.append(draft)
            elif rank < self.k:
                # An end further back is none, or one draft would not be greedy decoding.
                ended.append(draft)
        return going[: self.k], sorted(ended, key=lambda draft: -draft.score)[: self.k]
