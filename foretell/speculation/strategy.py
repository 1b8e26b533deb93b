"""What decides how a request's tokens come about.

A strategy is a generator of messages (types.py), never a loop of its own over a model; closing it
at any point leaves every cache valid. `Speculative` is the one that drafts. It and `Plain` run on
whatever branch their context is of, and take the target's rows from the request's source.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from foretell.core.distribution import Target
from foretell.core.drafter import Drafter, Feedback
from foretell.core.request import Method
from foretell.core.source import source_of
from foretell.core.tracing import trace_step
from foretell.core.tree import TokenTree
from foretell.core.types import Commit, Kept, Message, Outcome, Reply, Steps
from foretell.errors import BadConfig
from foretell.registry import load
from foretell.speculation.draft_size import sizes_for
from foretell.speculation.fitting import fitting
from foretell.speculation.stopwatch import Stopwatch
from foretell.verification.acceptance import Rule, default, walk

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

MOST = 1024  # nodes that may be asked for


class Strategy(Method):
    """The base: a frozen dataclass with `run`."""

    kind = "strategy"
    one_text = False  # whether it works on the request's own branch alone
    # Of one that chooses among what was drawn, the temperature of a request that names none; 0 is
    # refused then, at which all draws are alike. 0.0: any temperature will do.
    drawn_at = 0.0

    @property
    def most_texts(self) -> int:
        return 1  # that it writes side by side at most, each with rows of its own

    def run(self, ctx: Context) -> Steps:
        """Yields messages until the branch is done: a Commit on it came back with a reason."""
        raise NotImplementedError


@dataclass(frozen=True)
class Speculative(Strategy):
    """Draft a tree, let the target score all of it in one forward, verify, commit; again.

    Without a `rule` it is the one that the drafter names, if any. Raises UnknownMethod for it.
    """

    drafter: Drafter
    rule: Rule | None = None  # None: walk for deterministic trees, sequential for drawn ones
    nodes: int = 0  # drafted a step at most; 0: as many as the policy finds worth their cost
    one_text = True

    def __post_init__(self) -> None:
        if not 0 <= self.nodes <= MOST:
            allowed = f"between 0 (the policy decides) and {MOST}"
            raise BadConfig.field("nodes", self.nodes, allowed)
        if self.rule is None and self.drafter.rule:
            object.__setattr__(self, "rule", load(self.drafter.rule, "rule")())

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.drafter.models

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.drafter.needs

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return self.drafter.bring(models)

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig, before anything runs, for a rule of drawn tokens where none are."""
        rule = self.rule
        walks = ctx.sampler.greedy and rule is not None and rule.greedy
        if rule is not None and rule.drawn and not (self.drafter.draws or walks):
            what = f"rule {type(rule).__name__.lower()!r} cannot verify these trees"
            raise BadConfig(f"{what}: it needs {rule.needs}, and these are not drawn")
        return self.steps(ctx)

    def steps(self, ctx: Context) -> Steps:
        """The messages of `run`."""
        ctx = ctx.scoped(self.drafter)
        # Where another draft would mean other samples, measured time decides nothing: a seed gives
        # its tokens again. A request without one promises none.
        settled = ctx.sampler.greedy and (self.rule is None or self.rule.greedy)
        same = settled or not (self.drafter.draws or self.rule)
        ctx.timed = not self.nodes and (same or not ctx.repeats)
        source = source_of(ctx.request)
        target_state = yield from source.start(ctx)
        state = self.drafter.start(ctx)
        sizes = sizes_for(ctx, self.nodes, self.drafter)
        rule = self.rule.begin(ctx) if self.rule else default
        layers = len(ctx.models["target"].layout)
        named = (*self.drafter.taps, *(self.rule.taps if self.rule else ()))
        wanted = {tap if tap >= 0 else layers + 1 + tap for tap in named}
        taps = tuple(sorted(tap for tap in wanted if tap <= layers))
        beside = type(self.drafter).target_rows is not Drafter.target_rows
        while True:
            tree = TokenTree(ctx.tokens[-1])
            budget = sizes.budget()
            watch = Stopwatch()
            if budget > 1:
                tree = yield from watch.over(self.drafter.steps(ctx, state, budget))
                with watch:
                    tree = fitting(ctx, tree, self.drafter.whole, self.rule is None)
                    tree = sizes.fit(tree, watch.seconds)
            if beside:
                rows_of = partial(source.read, ctx, target_state)
                reply = yield from self.drafter.target_rows(ctx, state, tree, taps, rows_of)
            else:
                reply = yield from source.read(ctx, target_state, tree, taps)
            outcome, kept = yield from settle(ctx, tree, reply, rule)
            sizes.observe(outcome)
            step = Feedback(tree, reply, outcome, kept.tokens, watch.seconds)
            self.drafter.observe(ctx, state, step)
            if kept.reason:
                return


def one_by_one(ctx: Context) -> Steps:
    """Plain decoding: one forward, one token, until the branch is done."""
    source = source_of(ctx.request)
    state = yield from source.start(ctx)
    while True:
        tree = TokenTree(ctx.tokens[-1])
        reply = yield from source.read(ctx, state, tree, ())
        _, kept = yield from settle(ctx, tree, reply)
        if kept.reason:
            return


def settle(
    ctx: Context, tree: TokenTree, reply: Reply, rule: Any = walk, source: str = "target"
) -> Generator[Message, Any, tuple[Outcome, Kept]]:
    """Verifies `tree` by the rows of all its nodes, which are `source`'s; commits what it kept.

    A token that is not the target's own word counts as drafted, the last one too.
    """
    target = Target(reply.logits, ctx.sampler, ctx.output, tree)
    target.reply = reply
    outcome: Outcome = rule(tree, target, ctx.rng, len(ctx.output))
    tokens = [tree.tokens[node] for node in outcome.path]
    sources = [tree.sources[node] for node in outcome.path]
    if outcome.token is not None:
        tokens.append(outcome.token)
        sources.append(source)
    tested = [(tree.depths[node], accepted) for node, accepted in outcome.tested]
    drafted = sum(one != "target" for one in tree.sources[1:])
    drafted += outcome.token is not None and source != "target"
    rows = reply.logits
    if ctx.sampler.sampling.logprobs is not None:
        rows = rows[[0, *outcome.path][: len(tokens)]]
    kept: Kept = yield Commit(tokens, rows, ctx.branch, sources, drafted, tested)
    if ctx.request.trace is not None:
        position = len(ctx.tokens) - len(kept.tokens)
        step = trace_step(position, tree, reply, outcome, kept.tokens, sources)
        ctx.request.trace(step)
    return outcome, kept
