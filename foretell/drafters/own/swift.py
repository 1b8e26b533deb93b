"""The target drafts without some attention and MLP halves of its layers, searched for meanwhile.

It is self-speculation. A draft goes through the target's own layers but for a set of halves, never
of the first or the last layer, whose input passes on unchanged. It is a chain that ends after a
token of which the draft was not sure, with siblings: the surer, the fewer. Its rows lie after the
target's own, and verification writes over them. From the time when `window` + 1 tokens are written,
sets are tried beside it: one forward tells how many of these tokens a set would have guessed. Sets
are random, but every 25th is the one of which a Gaussian process promises most; the best is drafted
with.

Paper: Xia, Li, Zhang, Du, Li, SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference
Acceleration, arXiv:2410.06916
Guarantee: exact
Cost: target 1, layers 30 at most
Needs: a model that takes trees and whose attention and MLP can be run one by one
Trains: nothing
Differs:
- how many siblings there are and where a chain ends follows from the probability of the draft's
best token, also when sampling, where the reference looks at the token drawn: then the number of
draws would depend on what they are
- when sampling, siblings are drawn without replacement, and every branch of verification has the
request's sampling options; the reference leaves them out at its last one
- sets are tried on a branch that holds the last `context` tokens of the prompt, then the window;
the reference copies the cache for every try and for every draft
- a request begins with the best set that an earlier one of the same tenant found, else with every
odd layer's halves as in the reference; that set is tried first, and the search is the request's own
- no search is made under a cache policy; `best` is ours, and draws nothing at any temperature
- the process is asked about 256 random sets, where the reference searches the whole cube
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Drop, Message, Open, Reply
from foretell.drafters.model.without_replacement import widen_node
from foretell.drafters.own.gaussian import Surrogate
from foretell.errors import BadConfig

HALVES = ("attention", "mlp")
KAPPA = 2.5  # standard deviations that the process is hoped to be wrong by
CANDIDATES = 256  # sets that it is asked about
SEARCH = 1 << 20  # the first index of the search's draws, which no other draws of a step have
Part = int | tuple[int, str]
Skip = frozenset[tuple[int, str]]
Asking = Generator[Message, Any, Any]


@dataclass
class State:
    """State of a request; `halves` are those that may be left out."""

    halves: list[tuple[int, str]]
    layers: int
    skip: Skip  # the set in use, the best known
    best: float = -1.0  # share of tokens that it guessed; below 0: not tried
    steps: int = 0
    tried: int = 0
    failed: int = 0  # sets in a row that were no better
    branch: int | None = None  # where sets are tried
    points: list[np.ndarray] = field(default_factory=list)  # sets tried, (halves,) of 0 and 1
    scores: list[float] = field(default_factory=list)
    over: bool = False  # the search

    def parts_without(self, skip: Skip) -> tuple[Part, ...]:
        """Parts of layers that run without these halves."""
        parts: list[Part] = []
        for layer in range(self.layers):
            kept_halves = [(layer, half) for half in HALVES if (layer, half) not in skip]
            parts += [layer] if len(kept_halves) == len(HALVES) else kept_halves
        return tuple(parts)


@dataclass(frozen=True)
class Swift(Drafter):
    """Counts, and shares between 0 and 1."""

    skip: Annotated[float, Range(0, 1)] = 0.45  # of the halves that may be left out
    length: Annotated[int, Range(1, 4096)] = 25  # tokens of a chain at most
    # a chain ends after a token of which the draft is less sure
    sure: Annotated[float, Range(0, 1)] = 0.8
    window: Annotated[int, Range(1, 4096)] = 32  # tokens that sets are tried on
    context: Annotated[int, Range(1, 4096)] = 256  # tokens of the prompt before them
    interval: Annotated[int, Range(1, 4096)] = 1  # steps from one try to the next
    bayes: Annotated[int, Range(1, 4096)] = 25  # every so many tries is the process's
    tries: Annotated[int, Range(1, 4096)] = 1000  # at most
    # tries in a row without a better set that end the search
    patience: Annotated[int, Range(1, 4096)] = 300
    enough: Annotated[float, Range(0, 1)] = 0.95  # share of tokens guessed that ends it
    best: bool = False  # the draft's best tokens at any temperature

    needs = ("tree", "layers", "parts")

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return not self.best

    def start(self, ctx: Context) -> State:
        layers = len(ctx.models["target"].layout)
        halves = [(layer, half) for layer in range(1, layers - 1) for half in HALVES]
        if int(len(halves) * self.skip) < 1:
            raise BadConfig(
                f"swift: {self.skip} of the {len(halves)} halves between the first and the last "
                f"layer of {ctx.models['target'].name} is none; give a larger skip or another model"
            )
        odd_halves = frozenset(half for half in halves if half[0] % 2)
        return State(halves, layers, ctx.shared(dict[str, Skip], "found").get("skip", odd_halves))

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        yield from self._search_step(ctx, state)
        return (yield from self._draft_chain(ctx, state, budget))

    @staticmethod
    def _read_reply(
        state: State,
        tree: TokenTree,
        branch: int,
        rows: Sequence[int],
        skip: Skip,
        reads_pending: bool,
    ) -> Asking:
        """The reply of a forward without `skip`, below rows that all layers wrote."""
        while True:
            if reads_pending:  # all layers read pending tokens, or their rows would be lost
                all_layers = tuple(range(state.layers))
                root = TokenTree(tree.tokens[0])
                yield Ask(root, branch=branch, rows=(), layers=all_layers)
            parts = state.parts_without(skip)
            reply: Reply = yield Ask(tree, branch=branch, rows=rows, layers=parts)
            if reply.new[0] >= 0:
                return reply
            reads_pending = True  # the cache had lost its rows

    def _draft_chain(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree, chain = TokenTree(ctx.tokens[-1]), TokenTree(ctx.tokens[-1])
        node = 0
        for draw_index in range(min(self.length, ctx.depth)):
            if len(tree) >= budget:
                break
            reads_pending = not (ctx.output or draw_index) and len(ctx.tokens) > 1
            reply = yield from self._read_reply(
                state, chain, ctx.branch, [draw_index], state.skip, reads_pending
            )
            free_nodes = budget - len(tree)
            nodes, probability = widen_node(
                ctx, tree, node, reply.logits[0], sibling_count, free_nodes, "swift", self.best
            )
            if not nodes:
                break
            node = nodes[0]
            if ctx.ends(tree, node) or probability < self.sure:
                break
            chain.add(draw_index, tree.tokens[node])
        return tree

    # --- the search

    def _search_step(self, ctx: Context, state: State) -> Asking:
        """Tries another set, where it is time to."""
        state.steps += 1
        too_early = len(ctx.output) <= self.window + 1 or ctx.request.policy is not None
        if too_early or state.over or state.steps % self.interval:
            return
        if state.best < 0:
            state.best = yield from self._score_candidate(ctx, state, state.skip)
        tried_halves, point = self._next_candidate(ctx, state)
        halves_score = yield from self._score_candidate(ctx, state, tried_halves)
        state.points.append(point)
        state.scores.append(halves_score)
        state.tried += 1
        state.failed += 1
        if halves_score > state.best:
            state.best, state.skip, state.failed = halves_score, tried_halves, 0
            ctx.shared(dict[str, Skip], "found")["skip"] = tried_halves
        is_done = state.best > self.enough or state.failed > self.patience
        state.over = is_done or state.tried >= self.tries
        if state.over and state.branch is not None:
            yield Drop(state.branch)

    def _next_candidate(self, ctx: Context, state: State) -> tuple[Skip, np.ndarray]:
        """The next set to try, and its point: the coordinates of the left out halves are 1."""
        half_count = len(state.halves)
        skip_count = int(half_count * self.skip)
        asks_process = bool(state.points) and (state.tried + 1) % self.bayes == 0
        set_count = CANDIDATES if asks_process else 1
        noise = (
            ctx.rng.gumbel(set_count * half_count, len(ctx.output), SEARCH)
            .numpy()
            .reshape(set_count, half_count)
        )
        points = np.zeros((set_count, half_count))
        np.put_along_axis(points, np.argsort(-noise, 1)[:, :skip_count], 1.0, 1)
        best_index = 0
        if asks_process:
            process = Surrogate(np.stack(state.points), np.array(state.scores))
            best_index = int(process.upper_bounds(points, KAPPA).argmax())
        chosen_point = points[best_index]
        return frozenset(
            state.halves[half_index] for half_index in np.flatnonzero(chosen_point)
        ), chosen_point

    def _score_candidate(self, ctx: Context, state: State, skip: Skip) -> Asking:
        """The share of the first `window` tokens after the first that the set guesses."""
        prompt_length = len(ctx.tokens) - len(ctx.output)
        text = ctx.tokens[max(0, prompt_length - self.context) : prompt_length + self.window + 1]
        window_tokens = text[-self.window :]
        prompt_tokens = text[: -self.window]
        branch, opens_branch = state.branch, state.branch is None
        if branch is None:
            branch = state.branch = yield Open(prompt_tokens)
        tree = TokenTree(prompt_tokens[-1]).chain(window_tokens[:-1])
        reply = yield from self._read_reply(
            state, tree, branch, range(self.window), skip, opens_branch
        )
        is_guessed = reply.logits.argmax(-1) == torch.tensor(
            window_tokens, device=reply.logits.device
        )
        return float(is_guessed.double().mean())


def sibling_count(probability: float) -> int:
    """How many tokens stand beside each other where the best has this probability."""
    for min_probability, count in ((0.95, 3), (0.8, 5), (0.5, 8)):
        if probability > min_probability:
            return count
    return 10
