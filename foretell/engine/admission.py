"""Which requests run: as many as memory and their number allow, by priority and in fairness.

A request that was taken in waits, *paused*, until there is room for it, and may be paused again
when the running ones outgrow the memory: then the latest of the lowest priority gives up its rows,
which are computed again (or found among shared prefixes) when its turn comes. Of equal priority
the tenant goes first that has been served the fewest tokens (Sheng et al., Fairness in Serving
Large Language Models, algorithm 2, with a prompt's tokens charged on admission and output as it
comes); within a tenant the first to come. Nobody waits for ever: AGE seconds count as one priority
more, up to the highest one that there is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.cache.buffers import roomy
from foretell.constraints.asking import bare
from foretell.engine.memory_budget import reserved
from foretell.errors import DeadlineExceeded, RequestFailed

if TYPE_CHECKING:
    from foretell.engine.live import Live

AGE = 15.0  # seconds since a request came that count as one priority more
RESERVE = 64  # tokens beyond its text that a request must have room for to begin


@dataclass
class Admission:
    """`memory`: bytes of cache rows that running requests hold, shared prefixes aside; `requests`:
    how many run at once; `budget`: bytes in all, weights included (see engine.memory_budget);
    `branches`: texts that one has side by side. None: no limit.
    """

    memory: int | None = None
    requests: int | None = None
    budget: int | None = None
    branches: int | None = None
    preempted: int = 0  # how often a request had to give up its rows
    highest: int = 0  # priority of all requests now
    served: Counter[str] = field(default_factory=Counter)  # tokens, by tenant

    def arrive(self, tenant: str, others: Sequence[Live]) -> None:
        """A request of `tenant` comes beside `others`. Who was away has saved up no claims."""
        tenants = {live.ctx.request.tenant for live in others}
        if tenant not in tenants:
            least = min((self.served[other] for other in tenants), default=0)
            self.served[tenant] = max(self.served[tenant], least)

    def __call__(self, engine: Any) -> None:
        """Decides before a step of `engine` who takes part in it. Who is late ends."""
        self._end_late(engine)
        self.highest = max((live.ctx.request.priority for live in engine.live), default=0)
        running = [live for live in engine.live if not live.paused]
        waiting = [live for live in engine.live if live.paused]
        used = 0
        if self.memory is not None:
            used = self._make_room(engine, running, waiting)
        while waiting and (self.requests is None or len(running) < self.requests):
            first = min(waiting, key=self.turn)
            needed = self._needed(first)
            if running and self.memory is not None and used + needed > self.memory:
                break  # nobody overtakes it, or a large request would wait for ever
            if running and not self._has_room(engine, running, first):
                break
            waiting.remove(first)
            first.paused = False
            running.append(first)
            used += needed
            self.served[first.ctx.request.tenant] += len(first.ctx.request.prompt)
        engine.running = len(running)

    def _has_room(self, engine: Any, running: Sequence[Live], first: Live) -> bool:
        """Whether the budget has room for one more."""
        if self.budget is None:
            return True
        rooms = [live.ctx.request.room for live in (*running, first)]
        return reserved(engine) + sum(room.bytes for room in rooms if room) <= self.budget

    def _end_late(self, engine: Any) -> None:
        now = time.perf_counter()
        for live in [live for live in engine.live if live.ctx.request.deadline < now]:
            seconds = now - live.started
            error = DeadlineExceeded(
                f"the request was not done {seconds:.1f} s after it came; "
                "give it more time, or fewer tokens"
            )
            engine.fail(live, error)

    def turn(self, live: Live) -> tuple[int, int, int]:
        """Who is smaller comes first."""
        request = live.ctx.request
        aged = request.priority + int((time.perf_counter() - live.started) / AGE)
        priority = max(request.priority, min(aged, self.highest))
        return -priority, self.served[request.tenant], live.index

    def _make_room(self, engine: Any, running: list[Live], waiting: list[Live]) -> int:
        """Pauses requests until the others fit; returns the bytes that these hold."""
        assert self.memory is not None
        held = {live: sum(cache.allocated for cache in live.caches.values()) for live in running}
        used = sum(held.values())
        last_first = sorted(running, key=lambda live: (live.ctx.request.priority, -live.index))
        for live in last_first:
            if used <= self.memory:
                break
            if len(running) == 1:
                error = RequestFailed(
                    f"the request needs more than the {self.memory:,} bytes that cache rows may "
                    "take; allow more memory, or ask for fewer tokens"
                )
                engine.fail(live, error)
            elif not engine.preempt(live):
                continue
            else:
                live.paused = True
                self.preempted += 1
                waiting.append(live)
            running.remove(live)
            used -= held[live]
        return used

    @staticmethod
    def _needed(live: Live) -> int:
        """Bytes that the buffers of a request's rows and states take when it begins."""
        ctx = live.ctx
        strategy = bare(ctx.request.strategy)
        branches = max(len(ctx.branches), getattr(strategy, "most_texts", 1))
        longest = max(len(branch.tokens) for branch in ctx.branches.values())
        tokens = ctx.limit if hasattr(strategy, "canvases") else longest + RESERVE
        names = {"target", *(name for part in ctx.request.parts for name in part.models)}
        models = [ctx.models[name] for name in names]
        rows = roomy(tokens) * sum(model.row_bytes + model.fed_bytes for model in models)
        return branches * (rows + sum(model.state_bytes for model in models))
