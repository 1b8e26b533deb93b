"""What decides how a request's tokens come about. A strategy is a generator of messages (types.py),
never a loop of its own over a model; closing it at any point leaves every cache valid.
`Speculative` is the one that drafts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.core.drafter import Drafter, Step
from foretell.core.sampling import Target
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Kept, Reply, Steps
from foretell.core.verify import Rule, default
from foretell.errors import BadConfig
from foretell.policy.sizes import Policy

if TYPE_CHECKING:
    from foretell.core.engine import Context


class Strategy:
    """The base: a frozen dataclass with `run`."""

    kind = "strategy"
    models: tuple[str, ...] = ()  # models besides the target
    needs: tuple[str, ...] = ()  # capabilities of the target

    def run(self, ctx: Context) -> Steps:
        """Yields messages until the request is done; returns when a Commit on its branch comes back
        with a reason.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Speculative(Strategy):
    """Draft a tree, let the target score all of it in one forward, verify, commit; again."""

    drafter: Drafter
    rule: Rule | None = None  # None: walk for deterministic trees, sequential for drawn ones
    nodes: int = 0  # drafted a step at most; 0: as many as the policy finds worth their cost

    def __post_init__(self) -> None:
        if not 0 <= self.nodes <= 1024:
            raise BadConfig.field("nodes", self.nodes, "between 0 (the policy decides) and 1024")

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.drafter.models

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.drafter.needs

    def run(self, ctx: Context) -> Steps:
        ctx = ctx.scoped(self.drafter)
        # Where another draft would mean other samples, time decides nothing: a seed gives its
        # tokens again.
        ctx.timed = not self.nodes and (ctx.sampler.greedy or not (self.drafter.draws or self.rule))
        state = self.drafter.start(ctx)
        policy = Policy(ctx, self.nodes, self.drafter.whole)
        taps = tuple(
            t if t >= 0 else len(ctx.models["target"].layout) + 1 + t for t in self.drafter.taps
        )
        while True:
            tree, start = TokenTree(ctx.tokens[-1]), time.perf_counter()
            if (budget := policy.budget()) > 1:
                tree = policy.fit((yield from self.drafter.steps(ctx, state, budget)))
                policy.spent += time.perf_counter() - start
            reply: Reply = yield Ask(tree, taps=taps)
            target = Target(reply.logits, ctx.sampler, ctx.output, tree.words)
            outcome = (self.rule or default)(tree, target, ctx.rng, len(ctx.output))
            tokens = [*(tree.tokens[n] for n in outcome.path), outcome.token]
            sources = [*(tree.sources[n] for n in outcome.path), "target"]
            tested = [(tree.depths[n], good) for n, good in outcome.tested]
            rows = (
                reply.logits
                if ctx.sampler.sampling.logprobs is None
                else reply.logits[[0, *outcome.path]]
            )
            kept: Kept = yield Commit(tokens, rows, 0, sources, len(tree) - 1, tested)
            policy.observe(outcome)
            self.drafter.observe(ctx, state, Step(tree, reply, outcome, kept.tokens))
            if kept.reason:
                return
