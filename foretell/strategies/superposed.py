"""Writes k drafts of a completion at the cost of one: the model reads a weighted sum of the drafts' newest tokens.

One forward a step and one chain of rows serve all drafts. Its logits, and for each draft counts of
n-grams, score the drafts' continuations; the best 2k of them are looked at, those that end are put
by, the best k others live on, and the embeddings of their newest tokens, weighted by the softmax of
the drafts' scores, are summed to the next input. The result is the best draft, all of them with
their scores are in `Output.samples`; which is the best is known at the end only, so nothing is
streamed before. Rows of such sums belong to no token and end with the request. Penalties, bans and
processors act on each draft's own text. Counts come from the prompt; with megabytes=64 from texts
finished before too, and then an answer may depend on what was answered before.

Paper: Shen et al., Superposed Decoding: Multiple Generations from a Single Autoregressive Inference
Pass, arXiv:2405.18400
Guarantee: lossy: from the second token on the model reads sums of embeddings, and counts of n-grams
weigh in
Cost: target 1
Needs: a model whose layers can be entered
Trains: nothing
Differs:
- n-grams are counted in the prompt and, if asked, in what this engine and tenant has finished, the
latest 4096 places of a token, where the paper counts in 200,000 documents - what the weights of the
contexts found leave of 1 (at least half) is the model's own share of the n-gram law, since few
counts would else force copies (backoff=false is the paper's rule) - an end counts among the k best
continuations only, so that k=1 with alpha=0 is greedy decoding - it stops when no draft alive can
still become one of the k best
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.strategy import Strategy
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Finish, Reply, Sampling, Steps
from foretell.errors import BadConfig
from foretell.text import stopped

WEIGHTS = np.array([0.01, 0.04, 0.15, 0.18, 0.12])  # of the contexts of 1, 2, ... tokens
PENALTY = 200.0  # of a draft none of whose continuations was ever counted
PLACES = 4096  # of a token that are looked at, the latest
END = -1  # stands before and behind every text
MIXED = -1  # the token of a node whose state is a sum
REFUSED = {
    "temperature": "nothing is drawn, and the method's own field shapes the law: superposed:temperature=0.06",
    "top_k": "the method's own field limits the tokens: superposed:m=9",
    **dict.fromkeys(("top_p", "min_p", "typical_p"), "nothing is drawn"),
    "logprobs": "its rows belong to several texts at once",
}


class Texts:
    """Texts and the places of every token in them, to count n-grams; beyond `megabytes` the older
    half goes.
    """

    def __init__(self, megabytes: int):
        self.megabytes = megabytes
        self.restart([END])

    def restart(self, tokens: Sequence[int]) -> None:
        self.tokens = array("i")
        self.places: dict[int, array[int]] = {}
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        for place, token in enumerate(tokens, len(self.tokens)):
            self.places.setdefault(token, array("i")).append(place)
        self.tokens.extend(tokens)

    @property
    def nbytes(self) -> int:
        """An estimate."""
        return 8 * len(self.tokens) + 256 * len(self.places)

    def add(self, text: Sequence[int]) -> None:
        """Takes in a text; of one that is too long its end."""
        self._append([*text, END])
        while self.nbytes > self.megabytes << 20:
            self.restart([END, *self.tokens[len(self.tokens) // 2 + 1 :]])

    def count(self, context: Sequence[int], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the last 1, 2, ... tokens of `context`: how often each of ids (m,) followed, (5, m);
        and anything, (5,).
        """
        hits, totals = np.zeros((len(WEIGHTS), len(ids))), np.zeros(len(WEIGHTS))
        text = np.frombuffer(self.tokens, np.int32)
        if context[-1] not in self.places:
            return hits, totals
        at = np.frombuffer(self.places[context[-1]], np.int32)[-PLACES:]
        at = at[text[at + 1] != END]
        for n, token in enumerate(context[: -len(WEIGHTS) - 1 : -1]):
            at = at[text[at - n] == token]
            hits[n], totals[n] = (text[at + 1][:, None] == ids).sum(0), len(at)
        return hits, totals

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor(self.tokens, dtype=torch.int32)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes in what `tensors` gave. Raises ValueError if it is none of that."""
        tokens = tensors.get("tokens")
        if tokens is None or tokens.dtype != torch.int32 or tokens.ndim != 1 or not len(tokens):
            raise ValueError("'tokens' must be a list of 32-bit whole numbers")
        if int(tokens.min()) < END or int(tokens[0]) != END or int(tokens[-1]) != END:
            raise ValueError(f"'tokens' must be token ids, with {END} before and behind every text")
        self.restart(tokens.tolist())


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
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"superposed:{name}", getattr(self, name), f"between {low} and {high}"
                )

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for a sampling option that cannot be honoured."""
        sampling, usual = ctx.request.sampling, Sampling()
        for name, reason in REFUSED.items():
            if (value := getattr(sampling, name)) != getattr(usual, name):
                raise BadConfig(
                    f"superposed cannot honour {name}={value!r}: {reason}; leave {name} out"
                )
        return self._steps(ctx)

    def _steps(self, ctx: Context) -> Steps:
        model, prompt, room = ctx.models["target"], list(ctx.tokens), ctx.limit - len(ctx.tokens)
        texts = [Texts(4096)]
        texts[0].add(prompt)
        if self.megabytes and self.alpha:
            texts.append(ctx.shared(lambda: Texts(self.megabytes)))
        tree, alive, done = TokenTree(prompt[-1]), [Draft(0.0, [])], list[Draft]()
        reply: Reply = yield Ask(tree)
        while True:
            alive, done = self.extend(ctx, texts, reply.logits[0], alive, done)
            settled = len(done) == self.k and bool(alive) and done[-1].score >= alive[0].score
            if not alive or settled or len(alive[0].tokens) >= room:
                break
            shares = mixture(alive)
            tree.add(len(tree) - 1, MIXED)
            reply = yield Ask(
                tree, states=superpose(model.embed(list(shares)), list(shares.values()))
            )
        ranked = [(d.tokens, d.score, "stop") for d in done] + [
            (d.tokens, d.score, "length") for d in alive
        ]
        answers = sorted(ranked, key=lambda answer: -answer[1])[: self.k]
        tokens, _, reason = answers[0]
        yield Commit(tokens, reply.logits, sources=["target"] * len(tokens))
        for store in texts[1:]:
            store.add([*prompt, *tokens])
        yield Finish(0, reason, answers)

    def extend(
        self,
        ctx: Context,
        texts: Sequence[Texts],
        row: torch.Tensor,
        alive: Sequence[Draft],
        done: Sequence[Draft],
    ) -> tuple[list[Draft], list[Draft]]:
        """The k best drafts that go on behind row (V,), and the k best that have ended; both best
        first.
        """
        options: list[tuple[float, int, int]] = []
        for i, draft in enumerate(alive):
            if not i or not ctx.sampler.plain:
                ids, logs = self.best(ctx.sampler.scores(row, draft.tokens))
            if self.alpha:
                context = [*ctx.tokens[-len(WEIGHTS) :], *draft.tokens[-len(WEIGHTS) :]]
                hits, totals = zip(*(text.count(context, ids) for text in texts), strict=True)
                scores = self.score(logs, np.sum(hits, axis=0), np.sum(totals, axis=0))
            else:
                scores = logs
            pairs = zip(scores.tolist(), ids.tolist(), strict=True)
            options += [(draft.score + s, i, t) for s, t in pairs if s > -math.inf]
        options.sort(key=lambda option: -option[0])
        going, ended, request = list[Draft](), list(done), ctx.request
        for rank, (score, i, token) in enumerate(options[: 2 * self.k]):
            tokens = [*alive[i].tokens, token]
            if not (
                token in ctx.sampler.stops or stopped(request.text, request.sampling.stop, tokens)
            ):
                going.append(Draft(score, tokens))
            elif (
                rank < self.k
            ):  # an end further back is none, or one draft would not be greedy decoding
                ended.append(Draft(score, tokens))
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
        shares[draft.tokens[-1]] = shares.get(draft.tokens[-1], 0.0) + math.exp(
            draft.score - drafts[0].score
        )
    return {token: share / sum(shares.values()) for token, share in shares.items()}


def superpose(states: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(n, E) -> (1, E), the weighted sum, computed in at least float32."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return (wide * wide.new_tensor(weights)[:, None]).sum(0, keepdim=True).to(states.dtype)
