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
n-gram distribution, since few counts would else force copies; backoff=false is the paper's rule
- an end counts among the k best continuations only, so that k=1 with alpha=0 is greedy decoding
- it stops when no living draft can still become one of the k best
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_options, refuse_policy, refuse_source
from foretell.core.settings import Range
from foretell.core.spending import REASON, Spent
from foretell.core.text import TokenIds, check_ids
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Message, Reply, Steps
from foretell.speculation.strategy import Strategy
from foretell.strategies.parallel.superposing import (
    WEIGHTS,
    Draft,
    best_candidates,
    draw_opening,
    mixed_scores,
    mixing_weights,
    superpose_states,
)
from foretell.strategies.parallel.text_counts import TextCounts, count_in_texts, counts_of

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

    k: Annotated[int, Range(1, 64)] = 3  # drafts
    m: Annotated[int, Range(1, 1024)] = 9  # tokens of a row that may follow, the best
    temperature: Annotated[float, Range(0.001, 100)] = 0.06  # of the model's distribution; not 0
    # what the n-grams' distribution counts in a score, the model's 1 - alpha; 0: no n-grams
    alpha: Annotated[float, Range(0, 1)] = 0.54
    # the n-grams' distribution keeps a share of the model's; no: only what was counted may follow
    backoff: bool = True
    # of finished texts that n-grams are counted in too; 0: of none
    megabytes: Annotated[int, Range(0, 4096)] = 0
    corpus: TokenIds = ()  # a text that n-grams are counted in too
    # tokens after which the best draft alone goes on, and divides anew; 0: never
    reset: Annotated[int, Range(0, 1 << 20)] = 0
    # first tokens that are drawn by nucleus sampling
    opening: Annotated[int, Range(0, 1 << 20)] = 0
    nucleus: Annotated[float, Range(1e-06, 1)] = 0.9  # probability of what these are drawn from

    needs = ("layers",)
    draws = False

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for what cannot be honoured."""
        refuse_options("superposed", ctx.request.sampling, REFUSED)
        refuse_source("superposed", ctx.request)
        refuse_policy("superposed", ctx.request)
        check_ids("superposed:corpus", self.corpus, ctx.models["target"].vocab)
        return self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        prompt, counted_texts = list(ctx.tokens), self._counted_texts(ctx)
        token_room = ctx.limit - len(prompt)  # tokens
        opening_tokens = yield from draw_opening(ctx, min(self.opening, token_room), self.nucleus)
        living_drafts, ended_drafts = [Draft(0.0, opening_tokens)], list[Draft]()
        if opening_tokens and ctx.sampler.is_ended(opening_tokens):
            living_drafts, ended_drafts = ended_drafts, living_drafts
        cut_reason = "length"
        try:
            while not self.is_over(living_drafts, ended_drafts, token_room):
                living_drafts, ended_drafts = yield from self._write_stretch(
                    ctx, counted_texts, living_drafts[0], ended_drafts, token_room
                )
        except Spent:
            cut_reason = REASON
        answers = [(draft.tokens, draft.score, "stop") for draft in ended_drafts]
        answers += [(draft.tokens, draft.score, cut_reason) for draft in living_drafts]
        answers = sorted(answers, key=lambda scored_answer: -scored_answer[1])[: self.k]
        tokens, _, reason = answers[0]
        yield Commit(tokens, torch.empty(0), sources=["target"] * len(tokens))
        if self.megabytes and self.alpha:
            counted_texts[-1].add([*prompt, *tokens])
        yield Finish(0, reason, answers)

    def _counted_texts(self, ctx: Context) -> list[TextCounts]:
        """Texts that n-grams are counted in; last, if there is one, the store of finished texts."""
        counted_texts = [counts_of(ctx.tokens)]
        if self.corpus:
            counted_texts.append(ctx.shared(lambda: counts_of(self.corpus), "corpus"))
        if self.megabytes and self.alpha:
            counted_texts.append(ctx.shared(lambda: TextCounts(self.megabytes)))
        return counted_texts

    def is_over(
        self, living_drafts: Sequence[Draft], ended_drafts: Sequence[Draft], token_room: int
    ) -> bool:
        """Whether there is no draft to go on with, or none that could still be among the k best."""
        is_settled = (
            len(ended_drafts) == self.k
            and bool(living_drafts)
            and ended_drafts[-1].score >= living_drafts[0].score
        )
        return not living_drafts or is_settled or len(living_drafts[0].tokens) >= token_room

    def _write_stretch(
        self,
        ctx: Context,
        texts: Sequence[TextCounts],
        start_draft: Draft,
        ended_drafts: list[Draft],
        token_room: int,
    ) -> Generator[Message, Any, tuple[list[Draft], list[Draft]]]:
        """Goes on from one draft, until the end or the next reset; returns the living drafts and
        the ended ones.
        """
        model = ctx.models["target"]
        branch = ctx.branch
        if start_draft.tokens:  # what was mixed is forgotten: this draft's own rows are computed
            (branch,) = yield Fork(ctx.branch, quiet=True)
            yield Commit(start_draft.tokens, torch.empty(0), branch)
        tree = TokenTree(ctx.branches[branch].tokens[-1])
        living_drafts = [start_draft]
        reply: Reply = yield Ask(tree, branch=branch)
        while True:
            living_drafts, ended_drafts = self.extend_drafts(
                ctx, texts, reply.logits[0], living_drafts, ended_drafts
            )
            if self.is_over(living_drafts, ended_drafts, token_room) or len(tree) == self.reset:
                break
            token_weights = mixing_weights(living_drafts)
            tree.add(len(tree) - 1, MIXED, value=1.0)
            mixed_states = superpose_states(
                model.embed(list(token_weights)), list(token_weights.values())
            )
            reply = yield Ask(tree, branch=branch, states=mixed_states)
        if branch != ctx.branch:
            yield Drop(branch)
        return living_drafts, ended_drafts

    def extend_drafts(
        self,
        ctx: Context,
        texts: Sequence[TextCounts],
        row: torch.Tensor,
        living_drafts: Sequence[Draft],
        ended_drafts: Sequence[Draft],
    ) -> tuple[list[Draft], list[Draft]]:
        """The k best drafts that go on after row (V,), and the k best that have ended; both best
        first.
        """
        continuations: list[tuple[float, int, int]] = []  # (score, place among the living, token)
        for draft_index, draft in enumerate(living_drafts):
            if draft_index == 0 or not ctx.sampler.plain:
                token_ids, log_probs = best_candidates(
                    ctx.sampler.scores(row, draft.tokens), self.m, self.temperature
                )
            scores = log_probs
            if self.alpha:
                context = [*ctx.tokens[-len(WEIGHTS) :], *draft.tokens[-len(WEIGHTS) :]]
                hits, totals = count_in_texts(texts, context, token_ids, len(WEIGHTS))
                scores = mixed_scores(log_probs, hits, totals, self.alpha, self.backoff)
            for score, token in zip(scores.tolist(), token_ids.tolist(), strict=True):
                if score > -math.inf:
                    continuations.append((draft.score + score, draft_index, token))
        continuations.sort(key=lambda candidate: -candidate[0])
        continued_drafts: list[Draft] = []
        all_ended = list(ended_drafts)
        for rank, (score, draft_index, token) in enumerate(continuations[: 2 * self.k]):
            draft = Draft(score, [*living_drafts[draft_index].tokens, token])
            if not ctx.sampler.is_ended(draft.tokens):
                continued_drafts.append(draft)
            elif rank < self.k:
                # An end further back is none, or one draft would not be greedy decoding.
                all_ended.append(draft)
        all_ended.sort(key=lambda draft: -draft.score)
        return continued_drafts[: self.k], all_ended[: self.k]
