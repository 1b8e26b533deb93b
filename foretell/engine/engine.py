"""The loop: collect what live requests ask, run one packed forward, reply, commit, stop.

One request offline, many in a server, a toy model in a test: the same code. A scheduler decides who
takes part in the next forward. A request that fails ends with its error and takes nobody along.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from foretell.cache.cache import Cache
from foretell.cache.states import TappedStates
from foretell.core.context import Context
from foretell.core.model import Model
from foretell.core.request import Event, Request
from foretell.core.spending import within
from foretell.core.stores import Stores
from foretell.engine.admission import Admission
from foretell.engine.checks import models_for
from foretell.engine.forwards import answer
from foretell.engine.live import Live, Task
from foretell.engine.messages import handle, states_first
from foretell.engine.prefix_cache import Reuse
from foretell.engine.scheduler import FairPlan, Plan
from foretell.engine.status import Totals, status
from foretell.errors import ForetellError, RequestFailed
from foretell.ops.threads import steady
from foretell.speculation.costs import Costs

BROUGHT = 64  # methods whose own models are kept


class Engine:
    """`models` must have "target"; `eos`: ids that end a text. One thread at a time may `step`."""

    def __init__(
        self, models: Mapping[str, Model], eos: Sequence[int] = (), plan: Plan | None = None
    ):
        self.models = dict(models)
        self.eos = tuple(eos)
        self.plan = plan or FairPlan()
        self.costs: dict[tuple[Model, str, tuple[int, ...] | None], Costs] = {}
        self.stores = Stores()
        self.brought: dict[Any, Mapping[str, Model]] = {}  # of each method, the models it brought
        self.admission = Admission()
        self.reuse: Reuse | None = None  # of rows of earlier texts
        self.totals = Totals()
        self.live: list[Live] = []
        self.running = 0  # of these, those that take part in the current step
        self.texts = 0  # tokens of prompts in the target's last forward, while some are unfinished
        # Of the running step; if it is interrupted, the next one returns them.
        self.events: list[Event] = []
        self.requests = self.forwards = 0
        self.pool: ThreadPoolExecutor | None = None

    # --- requests

    def add(self, request: Request) -> Live:
        """Takes a request in.

        Raises Unsupported, PromptTooLong or BadConfig before any forward.
        """
        models = models_for(self, request)
        ctx = Context(self, request, models)
        root = Task(within(request.strategy.run(ctx), ctx, request.budget))
        live = Live(self.requests, ctx, root, time.perf_counter(), [root])
        self.requests += 1
        if not request.sampling.max_new_tokens:
            live.reason = "length"
        self.admission.arrive(request.tenant, self.live)
        self.live.append(live)
        return live

    def run(self) -> Iterator[Event]:
        """Drives every request to its end. Leaving the loop early ends those still in flight."""
        try:
            while self.live:
                yield from self.step()
        finally:
            for live in list(self.live):
                self.end(live)

    def end(self, live: Live) -> None:
        """Closes a request wherever it is and frees its rows."""
        live.asks.clear()
        live.root.close()
        live.free()
        if live in self.live:
            self.live.remove(live)
            self.totals.add(live.ctx.stats)
            self._trim()

    def _trim(self) -> None:
        """Forgets what no request has used for long: clients may name any number of methods."""
        contexts = [live.ctx for live in self.live]
        uses = {use for ctx in contexts for use in ctx.uses}
        self.stores.trim({ctx.request.tenant for ctx in contexts}, uses)
        running = {part for ctx in contexts for part in ctx.request.parts}
        for part in [part for part in [*self.brought][:-BROUGHT] if part not in running]:
            gone = {*self.brought.pop(part).values()} - {*self.models.values()}
            self.costs = {key: costs for key, costs in self.costs.items() if key[0] not in gone}

    def preempt(self, live: Live) -> bool:
        """Frees the request's rows, which are computed again when it goes on.

        False: it has rows that cannot be.
        """
        if not all(cache.recomputable for cache in live.caches.values()):
            return False
        if self.reuse is not None:
            self.reuse.ended(live)
        live.free()
        for entry in list(live.asks):
            branch = entry.ask.branch
            cache = self.cache_of(live, entry.ask.model, branch)
            entry.pending = cache.sync(live.ctx.branches[branch].tokens)
            if cache.beside is not None and entry.after is None:
                entry.after = states_first(self, live, branch)
        return True

    def fail(self, live: Live, error: BaseException) -> None:
        """Ends one request with an error."""
        if not isinstance(error, ForetellError):
            failed = RequestFailed(f"{live.ctx.request.name}: {type(error).__name__}: {error}")
            failed.__cause__ = error
            error = failed
        live.error, live.reason = error, "error"
        self.end(live)
        self.events.append(Event(live.index, [], [], "error"))

    def status(self) -> dict[str, Any]:
        """Numbers of what it does and has done: see foretell.engine.status."""
        return status(self)

    # --- one step

    @steady
    def step(self) -> list[Event]:
        """Lets every request run on to its next asks, then answers some of them by one forward."""
        self.admission(self)
        running = [live for live in self.live if not live.paused]
        for live in running:
            try:
                self._advance(live)
            except Exception as error:  # a user's processor or a strategy may raise anything
                self.fail(live, error)
        waiting = [entry for live in running for entry in live.asks if entry.after is None]
        if self.reuse is not None:
            waiting = self.reuse.ready(waiting)
        if waiting:
            for entry in waiting:
                entry.waited = self.forwards - entry.since
            answer(self, self.plan(waiting, self.costs))
        elif not self.events:
            self._wait_for_calls()
        events, self.events = self.events, []
        return events

    def _wait_for_calls(self) -> None:
        calls = [call for live in self.live for call in live.calls()]
        if calls:
            wait(calls, return_when=FIRST_COMPLETED)

    def _advance(self, live: Live) -> None:
        """Runs the request's tasks until each waits for something, or the request has ended."""
        for task in live.tasks:
            if task.call is not None and task.call.done():
                call, task.call = task.call, None
                error = call.exception()
                task.wake(None if error else call.result(), error)
        while live.reason is None:
            ready = next((task for task in live.tasks if task.ready), None)
            if ready is None:
                return
            self._resume(live, ready)
        self._finish(live)

    def _resume(self, live: Live, task: Task) -> None:
        """Sends a task its answer and handles the message that comes back."""
        answer, error = task.answer, task.error
        task.answer = task.error = None
        try:
            message = task.steps.throw(error) if error else task.steps.send(answer)
            task.ready = False
            handle(self, live, task, message)
        except StopIteration as end:
            self._end_task(live, task, end.value)
        except Exception as fault:
            self._end_task(live, task, error=fault)

    def _end_task(
        self, live: Live, task: Task, value: Any = None, error: Exception | None = None
    ) -> None:
        """A generator has returned or raised: its parent may go on, or the request has ended."""
        self._drop_task(live, task)
        parent = task.parent
        if parent is None:
            if error is not None:
                raise error
            branch = live.ctx.branches[live.result]
            live.reason = branch.reason or "stop"
            return
        parent.results[task.place] = value
        parent.running -= 1
        if error is not None or parent.first or not parent.running:
            for child in parent.children:
                if not child.ended:
                    self._drop_task(live, child)
            parent.children = []
            parent.wake(parent.results, error)

    def _drop_task(self, live: Live, task: Task) -> None:
        """Ends a task and those below it, and withdraws what they asked."""
        for child in task.children:
            if not child.ended:
                self._drop_task(live, child)
        live.asks = [entry for entry in live.asks if entry.task is not task]
        live.tasks.remove(task)
        task.close()

    def _finish(self, live: Live) -> None:
        """The request is done: what was not streamed yet follows, and its rows are freed."""
        ctx = live.ctx
        ctx.branches[0] = ctx.branches[live.result]
        live.result = 0  # other threads may be reading the result
        ctx.branches = {0: ctx.branches[0]}
        if rest := ctx.branches[0].output[live.streamed :]:
            self.events.append(Event(live.index, rest, ["target"] * len(rest)))
        elapsed = time.perf_counter() - live.started
        ctx.stats.ended(len(ctx.branches[0].output), elapsed)
        if self.reuse is not None:
            self.reuse.ended(live)
        self.end(live)
        self.events.append(Event(live.index, [], [], live.reason))

    # --- forwards

    def costs_of(
        self, model: Model, executor: str = "", layers: Any = None, jobs: int = 1
    ) -> Costs:
        """What forwards of a model cost, by the executor that computes so many jobs or by another.

        `layers`: where only a part of them runs.
        """
        key = (model, executor or model.executor_of(jobs), layers)
        if key not in self.costs:
            self.costs[key] = Costs(model)
        return self.costs[key]

    def take_costs(self, model: Model, costs: Costs) -> None:
        """Costs that were measured beforehand, of the model's usual executor."""
        costs.freeze()
        self.costs[model, model.usual_executor, None] = costs

    def cache_of(self, live: Live, name: str, branch: int) -> Cache:
        """The model's cache of this branch, made on first use."""
        key = (name, branch)
        if key not in live.caches:
            ctx, model = live.ctx, live.ctx.models[name]
            beside = self.cache_of(live, "target", branch) if model.reads_target else None
            cache = model.cache(ctx.request, beside)
            text = ctx.branches[branch].tokens
            if name == "target":
                if ctx.kept_taps:
                    cache.states = TappedStates(ctx.kept_taps)
                if ctx.request.policy is not None:
                    cache.use(ctx.request.policy, len(text) - len(ctx.branches[branch].output))
                prefix = ctx.request.prefix
                if prefix is not None and tuple(text[: prefix.end]) == prefix.tokens != tuple(text):
                    cache.adopt(prefix)
            live.caches[key] = cache
        return live.caches[key]
