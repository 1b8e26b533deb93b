"""Several drafters in one tree: `suffix+token-recycling`.

Every part proposes its own tree; the trees are merged by prefix, a drawn one first, and the policy
keeps the nodes most likely to be accepted under one budget, whoever proposed them: what two parts
agree on is a kind of node of its own. A part whose tokens take longer, by its drafting, learning
and nodes, than tokens take on average is asked more rarely. One that asks a model comes last where
nothing is drawn, so that it counts by what the others had not; and how often it is asked depends on
how much the others promise in this step: where a copy is sure, a model's drafts rarely add to it.
Each keeps its stores and its state as if it were alone.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.tree_building import merge_trees
from foretell.errors import BadConfig
from foretell.speculation.costs import COSTLY_LOSS, Payoff, Promise
from foretell.speculation.draft_size import chances_of, estimate_nodes, temperature_key
from foretell.speculation.stopwatch import Stopwatch

PROMISES = (0.25, 0.75, 1.5, 3.0)  # tokens that the others promise, between kinds of steps


@dataclass
class Pace:
    """Running means of a step: its tokens and its seconds, of drafting and of the forward."""

    tokens: float = 0.0
    seconds: float = 0.0
    beside: float = 0.0  # seconds that taking note of the last one took

    def note_step(self, tokens: float, seconds: float) -> float:
        """Returns the seconds a token takes now."""
        self.tokens += (tokens - self.tokens) / (8 if self.tokens else 1)
        self.seconds += (seconds - self.seconds) / (8 if self.seconds else 1)
        return self.seconds / self.tokens


@dataclass
class Part:
    """A part of a composition in one request."""

    drafter: Drafter
    ctx: Context
    state: Any
    payoff: Payoff  # of asking it in steps like this one
    payoffs: Sequence[Payoff]  # by what the parts before it promise, see PROMISES; or of all steps
    promise: Promise | None  # of its trees; None: asking it takes next to nothing
    pace: Pace  # of all parts
    sources: set[str] = field(default_factory=set)  # of its last proposal
    seconds: float = -1.0  # which took so long; below 0: it was not asked
    begun: bool = False  # whether it was asked: the first time it also takes in the text
    waited: int = 0  # steps that the request took before that

    def reading_seconds(self) -> float:
        """About how long its models will take to read the text; 0 where they have begun."""
        seconds = 0.0
        if self.begun:
            return seconds
        for model_name in self.drafter.models:
            model = self.ctx.models[model_name]
            costs, share = self.ctx.engine.costs_of(model), 1.0
            if not costs.seconds and self.promise is not None:
                costs, share = self.ctx.costs, self.promise.share
            largest_size = max(costs.seconds, default=1)
            read_tokens = min(len(self.ctx.tokens), model.reads or model.context)
            seconds += share * costs.seconds.get(largest_size, 0.0) / largest_size * read_tokens
        return seconds

    def is_due(self, tree: TokenTree) -> bool:
        """Whether to ask it in this step, where the others have proposed this tree.

        Not where its trees promise less than asking takes at the present load. Its models read
        the text first: at once where asking it has clearly paid lately, else when the request has
        run for as long as that takes, so that one that ends early loses little by it. Where
        asking it has not paid, reading may lose no more than COSTLY_LOSS of the time.
        """
        payoff, promise = self.payoff_beside(tree), self.promise
        if promise is not None:
            remaining_tokens = self.ctx.limit - len(self.ctx.tokens)
            if not promise.pays(self.ctx.shares, self.reading_seconds, remaining_tokens):
                return False
        if not self.begun and not payoff.clearly_pays:
            patience = 1 if payoff.pays else 1 / COSTLY_LOSS
            waited_seconds = self.waited * self.ctx.costs.one_token_seconds(len(self.ctx.tokens))
            if waited_seconds < patience * self.reading_seconds():
                return False
        return payoff.is_due()

    def payoff_beside(self, tree: TokenTree) -> Payoff:
        """Whether asking it pays, where the others have proposed this tree."""
        if len(self.payoffs) > 1:
            self.payoff = self.payoffs[bisect(PROMISES, sum(tree.values[1:]))]
        return self.payoff


class JointPayoff(Payoff):
    """The payoff of a composition, asked whenever a part is due: each part pauses by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[Payoff, Promise | None]] = []

    def is_due(self) -> bool:
        for payoff, promise in self.parts:
            if payoff.wait <= 0 and (promise is None or promise.rest <= 0):
                return True
        for payoff, promise in self.parts:
            payoff.wait -= 1
            if promise is not None:
                promise.rest -= 1
        return False


def payoff_of_all_steps() -> list[Payoff]:
    """The payoff of all steps."""
    return [Payoff()]


def payoffs_by_kind() -> list[Payoff]:
    """A payoff for each kind of step, see PROMISES."""
    return [Payoff() for _ in range(len(PROMISES) + 1)]


def initial_promise(ctx: Context, drafter: Drafter) -> Promise:
    """The promise of a drafter's trees before there was one: what was measured of the model that it
    asks, whose forwards take as much less than the target's as it has fewer bytes, one a level.
    """
    draft_model, target = ctx.models[drafter.models[0]], ctx.models["target"]
    hit_rates = [depth[0] for depth in getattr(draft_model, "ranks", ())]
    level_count = max(1, len(hit_rates))
    share = draft_model.weight_bytes / max(1, target.weight_bytes)
    return Promise(hit_rates, level_count * share * ctx.costs.one_token_seconds(), share)


def proposal_order(drafter: Drafter, greedy: bool) -> tuple[bool, bool]:
    """Sorts drafters: the one that draws first, since its tree cannot be joined to another, then
    cheap ones.
    """
    draws_tokens = drafter.draws and not greedy
    return not draws_tokens, bool(drafter.models)


@dataclass(frozen=True)
class Composition(Drafter):
    """Built by spec.resolve from `a+b`."""

    parts: tuple[Drafter, ...]

    def __post_init__(self) -> None:
        if sum(part.draws for part in self.parts) > 1:
            raise BadConfig(
                "of the drafters joined by '+' at most one may draw its tokens: choose one of them"
            )
        if len(set(self.parts)) < len(self.parts):
            raise BadConfig("a drafter is joined with itself by '+': name it once")
        parts_with_rows = [
            part for part in self.parts if type(part).target_rows is not Drafter.target_rows
        ]
        if parts_with_rows:
            method_name = type(parts_with_rows[0]).__module__.rpartition(".")[2].replace("_", "-")
            raise BadConfig(
                f"{method_name} has rows of its own computed beside its drafts, and cannot be "
                "joined by '+': name it alone"
            )

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(model for part in self.parts for model in part.models))

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        needs = [need for part in self.parts for need in part.needs]
        return tuple(dict.fromkeys(("tree", *needs)))

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(tap for part in self.parts for tap in part.taps))

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return any(part.draws for part in self.parts)

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return any(part.whole for part in self.parts)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        all_models: dict[str, Model] = {}
        for part in self.parts:
            part_models = part.bring(models)
            if all_models.keys() & part_models.keys():
                raise BadConfig("of the drafters joined by '+' at most one may have a head: choose")
            all_models |= part_models
        return all_models

    def start(self, ctx: Context) -> list[Part]:
        # Before the policy makes one that would pause all parts at once.
        joint_payoff = ctx.shared(JointPayoff, f"worth {temperature_key(ctx)}")
        pace = ctx.shared(Pace, f"pace {temperature_key(ctx)}")
        parts = []
        for drafter in sorted(
            self.parts, key=lambda part_drafter: proposal_order(part_drafter, ctx.sampler.greedy)
        ):
            drafter_scope = ctx.scope_to(drafter)
            pair_scope = ctx.scope_to((self, drafter))
            asks_model, warmth = bool(drafter.models), temperature_key(ctx)
            make_payoffs = payoffs_by_kind if asks_model else payoff_of_all_steps
            payoffs = pair_scope.shared(make_payoffs, f"worth {warmth}")
            promise = (
                pair_scope.shared(
                    partial(initial_promise, drafter_scope, drafter), f"promise {warmth}"
                )
                if asks_model
                else None
            )
            parts.append(
                Part(
                    drafter,
                    drafter_scope,
                    drafter.start(drafter_scope),
                    payoffs[0],
                    payoffs,
                    promise,
                    pace,
                )
            )
        joint_payoff.parts = [(part.payoff, part.promise) for part in parts]
        return parts

    def steps(self, ctx: Context, state: list[Part], budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        draws_tokens = self.draws and not ctx.sampler.greedy
        never_cut = self.whole or draws_tokens  # what is not cut afterwards has to fit now
        for part in state:
            free_nodes = budget - (len(tree) - 1 if never_cut else 0)
            part.seconds = -1.0
            if free_nodes <= 1 or (ctx.timed and not part.is_due(tree)):
                continue
            stopwatch = Stopwatch()
            proposal = yield from stopwatch.time_messages(
                part.drafter.steps(part.ctx, part.state, free_nodes)
            )
            merge_start = time.perf_counter()
            part.sources = set(proposal.sources[1:])
            if part.promise is not None:
                part.promise.note_tree(estimate_nodes(proposal, chances_of(ctx))[0][1:])
            tree = merge_trees(tree, proposal) if len(tree) > 1 else proposal
            part.seconds = stopwatch.seconds + time.perf_counter() - merge_start
        return tree

    def observe(self, ctx: Context, state: list[Part], step: Feedback) -> None:
        asked_parts = [part for part in state if part.seconds >= 0]
        for part in state:
            if part.promise is not None and not part.begun:
                part.waited += 1
            if not asked_parts:
                part.drafter.observe(part.ctx, part.state, step)
        if not asked_parts:
            return
        overhead_start = time.perf_counter()
        pace, tree = state[0].pace, step.tree
        # What is nobody's, of merging, cutting and taking note, is everybody's.
        asked_seconds = sum(part.seconds for part in asked_parts)
        shared_seconds = (max(0.0, step.seconds - asked_seconds) + pace.beside) / len(asked_parts)
        # The first of each node; of a root alone, the usual step, there is nobody.
        root_only = len(tree) == 1
        proposers = [] if root_only else [source.partition("+")[0] for source in tree.sources]
        step_seconds = ctx.shares(len(tree))
        node_seconds = float(step_seconds[-1] - step_seconds[0]) / max(1, len(tree) - 1)
        token_seconds = pace.note_step(
            1 + len(step.outcome.path), asked_seconds + float(step_seconds[-1])
        )
        for part in state:
            learning_start = time.perf_counter()
            part.drafter.observe(part.ctx, part.state, step)
            if part.seconds < 0:
                continue
            learning_seconds = time.perf_counter() - learning_start
            overhead_start += learning_seconds
            spent_seconds = part.seconds + shared_seconds + learning_seconds
            node_count = sum(proposer in part.sources for proposer in proposers)
            gained_tokens = sum(proposers[node] in part.sources for node in step.outcome.path)
            if part.begun:
                if part.promise is not None:
                    part.promise.note_seconds(spent_seconds)
                spent_seconds += node_seconds * node_count
                part.payoff.note_attempt(
                    gained_tokens, spent_seconds, token_seconds, ctx.engine.running
                )
            part.begun = True
            part.seconds = -1.0  # it may not be asked in the next step
        pace.beside = time.perf_counter() - overhead_start
