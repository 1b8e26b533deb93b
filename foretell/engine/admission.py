"""Admission and preemption: as many requests run as fit, by priority and in fairness.

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

from foretell.cache.buffers import roomy_length
from foretell.constraints.asking import inner_method
from foretell.engine.memory_budget import reserved_bytes
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

    def note_arrival(self, tenant: str, other_requests: Sequence[Live]) -> None:
        """Notes a request of `tenant` beside other ones. Who was away has saved up no claims."""
        tenants = {live_request.ctx.request.tenant for live_request in other_requests}
        if tenant not in tenants:
            least_served = min((self.served[other_tenant] for other_tenant in tenants), default=0)
            self.served[tenant] = max(self.served[tenant], least_served)

    def __call__(self, engine: Any) -> None:
        """Decides before a step of `engine` who takes part in it. Who is late ends."""
        self._end_late(engine)
        self.highest = max(
            (live_request.ctx.request.priority for live_request in engine.live), default=0
        )
        running = [live_request for live_request in engine.live if not live_request.paused]
        waiting = [live_request for live_request in engine.live if live_request.paused]
        used_bytes = 0
        if self.memory is not None:
            used_bytes = self._make_room(engine, running, waiting)
        while waiting and (self.requests is None or len(running) < self.requests):
            next_request = min(waiting, key=self.turn)
            needed_bytes = self._estimate_bytes(next_request)
            if running and self.memory is not None and used_bytes + needed_bytes > self.memory:
                break  # nobody overtakes it, or a large request would wait for ever
            if running and not self._has_room(engine, running, next_request):
                break
            waiting.remove(next_request)
            next_request.paused = False
            running.append(next_request)
            used_bytes += needed_bytes
            self.served[next_request.ctx.request.tenant] += len(next_request.ctx.request.prompt)
        engine.running = len(running)

    def _has_room(self, engine: Any, running: Sequence[Live], candidate: Live) -> bool:
        """Whether the budget has room for one more."""
        if self.budget is None:
            return True
        memory_rooms = [live_request.ctx.request.room for live_request in (*running, candidate)]
        return (
            reserved_bytes(engine) + sum(room.bytes for room in memory_rooms if room) <= self.budget
        )

    def _end_late(self, engine: Any) -> None:
        now = time.perf_counter()
        for live_request in [
            live_request for live_request in engine.live if live_request.ctx.request.deadline < now
        ]:
            seconds = now - live_request.started
            error = DeadlineExceeded(
                f"the request was not done {seconds:.1f} s after it came; "
                "give it more time, or fewer tokens"
            )
            engine.fail_request(live_request, error)

    def turn(self, live_request: Live) -> tuple[int, int, int]:
        """Order of a request among those that wait: the smallest comes first."""
        request = live_request.ctx.request
        aged_priority = request.priority + int((time.perf_counter() - live_request.started) / AGE)
        priority = max(request.priority, min(aged_priority, self.highest))
        return -priority, self.served[request.tenant], live_request.index

    def _make_room(self, engine: Any, running: list[Live], waiting: list[Live]) -> int:
        """Pauses requests until the others fit; returns the bytes that these hold."""
        assert self.memory is not None
        held_bytes = {
            live_request: sum(cache.allocated for cache in live_request.caches.values())
            for live_request in running
        }
        used_bytes = sum(held_bytes.values())
        last_first = sorted(
            running,
            key=lambda live_request: (live_request.ctx.request.priority, -live_request.index),
        )
        for live_request in last_first:
            if used_bytes <= self.memory:
                break
            if len(running) == 1:
                error = RequestFailed(
                    f"the request needs more than the {self.memory:,} bytes that cache rows may "
                    "take; allow more memory, or ask for fewer tokens"
                )
                engine.fail_request(live_request, error)
            elif not engine.preempt_request(live_request):
                continue
            else:
                live_request.paused = True
                self.preempted += 1
                waiting.append(live_request)
            running.remove(live_request)
            used_bytes -= held_bytes[live_request]
        return used_bytes

    @staticmethod
    def _estimate_bytes(live_request: Live) -> int:
        """Bytes that the buffers of a request's rows and states take when it begins."""
        ctx = live_request.ctx
        strategy = inner_method(ctx.request.strategy)
        branches = max(len(ctx.branches), getattr(strategy, "most_texts", 1))
        longest = max(len(branch.tokens) for branch in ctx.branches.values())
        tokens = ctx.limit if hasattr(strategy, "canvases") else longest + RESERVE
        names = {"target", *(name for part in ctx.request.parts for name in part.models)}
        models = [ctx.models[name] for name in names]
        rows = roomy_length(tokens) * sum(model.row_bytes + model.fed_bytes for model in models)
        return branches * (rows + sum(model.state_bytes for model in models))
