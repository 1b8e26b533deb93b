"""Several drafters in one tree: `suffix+token-recycling`.

Every part proposes its own tree; the trees are merged by prefix, a drawn one first, and the policy
keeps the nodes most likely to be accepted under one budget, whoever proposed them: what two parts
agree on is a kind of node of its own. A part whose tokens take longer, by its drafting, learning
and nodes, than tokens take on average is asked more rarely. Each keeps its stores and its state as
if it were alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from foretell.core.drafter import Drafter, Drafting, Step
from foretell.core.engine import Context
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.trees import merge
from foretell.policy.costs import Worth


@dataclass
class Part:
    """A part of a composition in one request."""

    drafter: Drafter
    ctx: Context
    state: Any
    worth: Worth
    sources: set[str] = field(default_factory=set)  # of its last proposal
    seconds: float = -1.0  # which took so long; below 0: it was not asked


class Joint(Worth):
    """Of a composition as a whole, which is asked whenever one of its parts is due: each has pauses
    of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Worth] = []

    def due(self) -> bool:
        if any(worth.wait <= 0 for worth in self.parts):
            return True
        for worth in self.parts:
            worth.wait -= 1
        return False


@dataclass
class Pace:
    """Running means of a step: its tokens and its seconds, of drafting and of the target's
    forward.
    """

    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: float, seconds: float) -> float:
        """Returns the seconds a token takes now."""
        self.tokens += (tokens - self.tokens) / (8 if self.tokens else 1)
        self.seconds += (seconds - self.seconds) / (8 if self.seconds else 1)
        return self.seconds / self.tokens


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

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(model for part in self.parts for model in part.models))

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(("tree", *(need for part in self.parts for need in part.needs))))

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(tap for part in self.parts for tap in part.taps))

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return any(part.draws for part in self.parts)

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return any(part.whole for part in self.parts)

    def start(self, ctx: Context) -> list[Part]:
        parts = []
        joint = ctx.shared(
            Joint, "worth"
        )  # before the policy makes one that would pause all parts at once
        for drafter in sorted(self.parts, key=lambda d: not d.draws):
            scope = ctx.scoped(drafter)
            worth = ctx.scoped((self, drafter)).shared(Worth, "worth")
            parts.append(Part(drafter, scope, drafter.start(scope), worth))
        joint.parts = [part.worth for part in parts]
        return parts

    def steps(self, ctx: Context, state: list[Part], budget: int) -> Drafting:
        tree, uncut = TokenTree(ctx.tokens[-1]), self.whole or self.draws
        for part in state:
            room = budget - (
                len(tree) - 1 if uncut else 0
            )  # what is not cut afterwards has to fit now
            part.seconds = -1.0
            if room <= 1 or (ctx.timed and not part.worth.due()):
                continue
            start = time.perf_counter()
            mine = yield from part.drafter.steps(part.ctx, part.state, room)
            part.sources = set(mine.sources[1:])
            tree = merge(tree, mine) if len(tree) > 1 else mine
            part.seconds = time.perf_counter() - start
        return tree

    def observe(self, ctx: Context, state: list[Part], step: Step) -> None:
        asked = [part.seconds for part in state if part.seconds >= 0]
        if not asked:
            for part in state:
                part.drafter.observe(part.ctx, part.state, step)
            return
        tree = step.tree
        firsts = [source.partition("+")[0] for source in tree.sources]  # who proposed it first
        line = ctx.costs.share(len(tree), len(ctx.tokens), len(ctx.live))
        node = float(line[-1] - line[0]) / max(1, len(tree) - 1)
        pace = ctx.shared(Pace, "pace").note(
            1 + len(step.outcome.path), sum(asked) + float(line[-1])
        )
        for part in state:
            start = time.perf_counter()
            part.drafter.observe(part.ctx, part.state, step)
            if part.seconds >= 0:
                spent = (
                    part.seconds
                    + time.perf_counter()
                    - start
                    + node * sum(f in part.sources for f in firsts)
                )
                part.worth.note(
                    sum(firsts[n] in part.sources for n in step.outcome.path), spent, pace
                )
                part.seconds = -1.0  # it may not be asked in the next step
