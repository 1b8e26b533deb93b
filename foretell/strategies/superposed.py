"""Writes k drafts of a completion at the cost of one: their newest tokens are one mixed input.

The model reads a weighted sum of the embeddings of the drafts' newest tokens. One forward a step
and one chain of rows serve all drafts. Its logits, and for each draft counts of n-grams, score the
drafts' continuations; the best 2k of them are looked at, those that end are set aside, the best k
others live on, and the embeddings of their newest tokens, weighted by the softmax of the drafts'
scores, are summed to the next input. The result is the best draft, all of them with their scores
are in `Output.samples`; which is the best is known at the end only, so nothing is streamed before.
Rows of such sums belong to no token and end with the request. Penalties, bans and processors act on
each draft's own text. Counts come from the prompt; with megabytes=64 from texts finished before
too, and then an answer may depend on what was answered before.

Paper: Shen et al., Superposed Decoding: Multiple Generations from a Single Autoregressive Inference
Pass, arXiv:2405.18400
Guarantee: lossy: from the second token on the model reads sums of embeddings, and counts of n-grams
weigh in
Cost: target 1
Needs: a model whose layers can be entered
Trains: nothing
Differs:
- n-grams are counted in the prompt and, if asked, in what this engine and tenant has finished, the
latest 4096 places of a token, where the paper counts in 200,000 documents
- what the weights of the contexts found leave of 1 (at least half) is the model's own share of the
n-gram law, since few counts would else force copies; backoff=false is the paper's rule
- an end counts among the k best continuations only, so that k=1 with alpha=0 is greedy decoding
- it stops when no living draft can still become one of the k best
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.strategy import Strategy
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Finish, Reply, Sampling, Steps
from foretell.errors import BadConfig
from foretell.ops.text_counts import TextCounts, count_in

WEIGHTS = np.array([0.01, 0.04, 0.15, 0.18, 0.12])  # of the contexts of 1, 2, ... tokens
PENALTY = 200.0  # of a draft none of whose continuations was ever counted
MIXED = -1  # the token of a node whose state is a sum
REFUSED = {
    "temperature": "nothing is drawn; superposed:temperature=0.06 shapes the law instead",
    "top_k": "the method has a field for it; give superposed:m=9",
    "top_p": "nothing is drawn",
    "min_p": "nothing is drawn",
    "typical_p": "nothing is drawn",
    "logprobs": "its rows belong to several texts at once",
}


class Draft(NamedTuple):
    """`score`: the sum of its tokens' log scores."""

    score: float
    tokens: list[int]


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
    megabytes: int = 0  # of finished texts that n-grams are counted in too; 0: in the prompt alone

    needs = ("layers",)

    def __post_init__(self) -> None:
        ranges = {
            "k": (1, 64),
            "m": (1, 1024),
            "temperature": (0.001, 100),
            "alpha": (0, 1),
            "megabytes": (0, 4096),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"superposed:{name}", value, f"between {low} and {high}")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for a sampling option that cannot be honoured."""
        usual = Sampling()
        for name, reason in REFUSED.items():
            value = getattr(ctx.request.sampling, name)
            if value != getattr(usual, name):
                raise BadConfig(
                    f"superposed cannot honour {name}={value!r}: {reason}; leave {name} out"
                )
        return self._steps(ctx)

    def _steps(self, ctx: Context) -> Steps:
        model = ctx.models["target"]
        prompt = list(ctx.tokens)
        room = ctx.limit - len(prompt)  # tokens
        texts = [TextCounts(4096)]
        texts[0].add(prompt)
        if self.megabytes and self.alpha:
            texts.append(ctx.shared(lambda: TextCounts(self.megabytes)))
        tree = TokenTree(prompt[-1])
        alive = [Draft(0.0, [])]
        done: list[Draft] = []
        reply: Reply = yield Ask(tree)
        while True:
            alive, done = self.extend(ctx, texts, reply.logits[0], alive, done)
            settled = len(done) == self.k and bool(alive) and done[-1].score >= alive[0].score
            if not alive or settled or len(alive[0].tokens) >= room:
                break
            shares = mixture(alive)
            tree.add(len(tree) - 1, MIXED, value=1.0)
            states = superpose(model.embed(list(shares)), list(shares.values()))
            reply = yield Ask(tree, states=states)
        answers = [(draft.tokens, draft.score, "stop") for draft in done]
        answers += [(draft.tokens, draft.score, "length") for draft in alive]
        answers = sorted(answers, key=lambda answer: -answer[1])[: self.k]
        tokens, _, reason = answers[0]
        yield Commit(tokens, reply.logits, sources=["target"] * len(tokens))
        for store in texts[1:]:
            store.add([*prompt, *tokens])
        yield Finish(0, reason, answers)

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
                ids, logs = self.best(ctx.sampler.scores(row, draft.tokens))
            scores = logs
            if self.alpha:
                context = [*ctx.tokens[-len(WEIGHTS) :], *draft.tokens[-len(WEIGHTS) :]]
                hits, totals = count_in(texts, context, ids, len(WEIGHTS))
                scores = self.score(logs, hits, totals)
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

    def best(self, scores: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The m best tokens of scores (V,), ties to the lowest id, and their log-probabilities
        among themselves.
        """
        least = scores.topk(min(self.m, len(scores))).values[-1]
        ids = ((scores >= least) & (scores > -torch.inf)).nonzero()[:, 0]
        order = scores[ids].argsort(descending=True, stable=True)[: self.m]
        logs = (scores[ids[order]].cpu().double() / self.temperature).log_softmax(-1)
        return ids[order].cpu().numpy(), logs.numpy()

    def score(self, logs: np.ndarray, hits: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """Log scores (m,): the model's log-probabilities logs (m,) and the counts' law, mixed
        geometrically.
        """
        known = WEIGHTS * (totals > 0)
        law = known @ (hits / np.maximum(totals, 1)[:, None])
        if not (self.backoff or law.any()):
            return (1 - self.alpha) * logs - PENALTY
        with np.errstate(divide="ignore"):
            counted = np.log(law)
        if self.backoff:
            counted = np.logaddexp(counted, np.log1p(-known.sum()) + logs)
        return np.asarray((1 - self.alpha) * logs + self.alpha * counted)


def mixture(drafts: Sequence[Draft]) -> dict[int, float]:
    """Newest token -> its weight in the next input: the softmax of the drafts' scores; of equal
    tokens the sum.
    """
    shares: dict[int, float] = {}
    for draft in drafts:
        token = draft.tokens[-1]
        shares[token] = shares.get(token, 0.0) + math.exp(draft.score - drafts[0].score)
    total = sum(shares.values())
    return {token: share / total for token, share in shares.items()}


def superpose(states: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(n, E) -> (1, E), the weighted sum, computed in at least float32."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    mixed = (wide * wide.new_tensor(weights)[:, None]).sum(0, keepdim=True)
    return mixed.to(states.dtype)
