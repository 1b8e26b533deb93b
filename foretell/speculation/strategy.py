"""What decides how a request's tokens come about.

A strategy is a generator of messages (types.py), never a loop of its own over a model; closing it
at any point leaves every cache valid. `Speculative` is the one that drafts. It and `Plain` run on
whatever branch their context is of, and take the target's rows from the request's source.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from foretell.core.distribution import Target
from foretell.core.drafter import Drafter, Feedback
from foretell.core.request import Method
from foretell.core.settings import Range, Settings
from foretell.core.source import source_of
from foretell.core.tracing import trace_step
from foretell.core.tree import TokenTree
from foretell.core.types import Commit, Kept, Message, Outcome, Reply, Steps
from foretell.errors import BadConfig
from foretell.registry import load_method
from foretell.speculation.draft_size import sizes_for
from foretell.speculation.fitting import fit_constraint
from foretell.speculation.stopwatch import Stopwatch
from foretell.verification.acceptance import Rule, verify_by_default, walk_tree

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

MOST = 1024  # nodes that may be asked for


class Strategy(Settings, Method):
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
    rule: Rule | None = None  # None: walk_tree for deterministic trees, verify_in_order for drawn
    # drafted a step at most; 0: as many as the policy finds worth their cost
    nodes: Annotated[int, Range(0, MOST)] = 0
    one_text = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule is None and self.drafter.rule:
            object.__setattr__(self, "rule", load_method(self.drafter.rule, "rule")())

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
        takes_walk = ctx.sampler.greedy and rule is not None and rule.greedy
        if rule is not None and rule.drawn and not (self.drafter.draws or takes_walk):
            complaint = f"rule {type(rule).__name__.lower()!r} cannot verify these trees"
            raise BadConfig(f"{complaint}: it needs {rule.needs}, and these are not drawn")
        return self.steps(ctx)

    def steps(self, ctx: Context) -> Steps:
        """The messages of `run`."""
        ctx = ctx.scope_to(self.drafter)
        # Where another draft would mean other samples, measured time decides nothing: a seed gives
        # its tokens again. A request without one promises none.
        decided_greedily = ctx.sampler.greedy and (self.rule is None or self.rule.greedy)
        same_tokens = decided_greedily or not (self.drafter.draws or self.rule)
        ctx.timed = not self.nodes and (same_tokens or not ctx.repeats)
        source = source_of(ctx.request)
        target_state = yield from source.start(ctx)
        drafter_state = self.drafter.start(ctx)
        sizes = sizes_for(ctx, self.nodes, self.drafter)
        rule = self.rule.begin(ctx) if self.rule else verify_by_default
        layer_count = len(ctx.models["target"].layout)
        named_taps = (*self.drafter.taps, *(self.rule.taps if self.rule else ()))
        requested_taps = {tap if tap >= 0 else layer_count + 1 + tap for tap in named_taps}
        taps = tuple(sorted(tap for tap in requested_taps if tap <= layer_count))
        has_own_rows = type(self.drafter).target_rows is not Drafter.target_rows
        while True:
            tree = TokenTree(ctx.tokens[-1])
            budget = sizes.node_budget()
            stopwatch = Stopwatch()
            if budget > 1:
                tree = yield from stopwatch.time_messages(
                    self.drafter.steps(ctx, drafter_state, budget)
                )
                with stopwatch:
                    tree = fit_constraint(ctx, tree, self.drafter.whole, self.rule is None)
                    tree = sizes.fit_tree(tree, stopwatch.seconds)
            if has_own_rows:
                rows_of = partial(source.read_rows, ctx, target_state)
                reply = yield from self.drafter.target_rows(ctx, drafter_state, tree, taps, rows_of)
            else:
                reply = yield from source.read_rows(ctx, target_state, tree, taps)
            outcome, committed = yield from verify_and_commit(ctx, tree, reply, rule)
            sizes.observe(outcome)
            step = Feedback(tree, reply, outcome, committed.tokens, stopwatch.seconds)
            self.drafter.observe(ctx, drafter_state, step)
            if committed.reason:
                return


def decode_one_by_one(ctx: Context) -> Steps:
    """Plain decoding: one forward, one token, until the branch is done."""
    source = source_of(ctx.request)
    source_state = yield from source.start(ctx)
    while True:
        tree = TokenTree(ctx.tokens[-1])
        reply = yield from source.read_rows(ctx, source_state, tree, ())
        _, committed = yield from verify_and_commit(ctx, tree, reply)
        if committed.reason:
            return


def verify_and_commit(
    ctx: Context, tree: TokenTree, reply: Reply, rule: Any = walk_tree, source: str = "target"
) -> Generator[Message, Any, tuple[Outcome, Kept]]:
    """Verifies `tree` by the rows of all its nodes, which are `source`'s; commits what it kept.

    A token that is not the target's own word counts as drafted, the last one too.
    """
    target = Target(reply.logits, ctx.sampler, ctx.output, tree)
    target.reply = reply
    outcome: Outcome = rule(tree, target, ctx.rng, len(ctx.output))
    new_tokens = [tree.tokens[node] for node in outcome.path]
    token_sources = [tree.sources[node] for node in outcome.path]
    if outcome.token is not None:
        new_tokens.append(outcome.token)
        token_sources.append(source)
    tested_depths = [(tree.depths[node], accepted) for node, accepted in outcome.tested]
    drafted_count = sum(node_source != "target" for node_source in tree.sources[1:])
    drafted_count += outcome.token is not None and source != "target"
    rows = reply.logits
    if ctx.sampler.sampling.logprobs is not None:
        rows = rows[[0, *outcome.path][: len(new_tokens)]]
    committed: Kept = yield Commit(
        new_tokens, rows, ctx.branch, token_sources, drafted_count, tested_depths
    )
    if ctx.request.trace is not None:
        position = len(ctx.tokens) - len(committed.tokens)
        step = trace_step(position, tree, reply, outcome, committed.tokens, token_sources)
        ctx.request.trace(step)
    return outcome, committed
