"""The loop of continuous batching: collect asks, run one packed forward, reply, commit.

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
from foretell.core.spending import limit_steps
from foretell.core.stores import Stores
from foretell.engine.admission import Admission
from foretell.engine.checks import check_adapter, models_for
from foretell.engine.forwards import answer_asks
from foretell.engine.live import Live, Task
from foretell.engine.messages import handle_message, states_first
from foretell.engine.prefix_cache import Reuse
from foretell.engine.scheduler import FairPlan, Plan
from foretell.engine.status import Totals, engine_status
from foretell.errors import ForetellError, RequestFailed
from foretell.ops.threads import steady_step
from foretell.speculation.costs import Costs

BROUGHT = 64  # methods whose own models are kept


class Engine:
    """`models` must have "target"; `eos`: ids that end a text. One thread at a time may `step`."""

    def __init__(
        self, models: Mapping[str, Model], eos: Sequence[int] = (), plan: Plan | None = None
    ):
        self.models = dict(models)
        for name, model in self.models.items():
            check_adapter(name, model)
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
        root = Task(limit_steps(request.strategy.run(ctx), ctx, request.budget))
        live_request = Live(self.requests, ctx, root, time.perf_counter(), [root])
        self.requests += 1
        if not request.sampling.max_new_tokens:
            live_request.reason = "length"
        self.admission.note_arrival(request.tenant, self.live)
        self.live.append(live_request)
        return live_request

    def run(self) -> Iterator[Event]:
        """Drives every request to its end. Leaving the loop early ends those still in flight."""
        try:
            while self.live:
                yield from self.step()
        finally:
            for live_request in list(self.live):
                self.end(live_request)

    def end(self, live_request: Live) -> None:
        """Closes a request wherever it is and frees its rows."""
        live_request.asks.clear()
        live_request.root.close()
        live_request.free_rows()
        if live_request in self.live:
            self.live.remove(live_request)
            self.totals.add(live_request.ctx.stats)
            self._trim_stores()

    def _trim_stores(self) -> None:
        """Forgets what no request has used for long: clients may name any number of methods."""
        contexts = [live_request.ctx for live_request in self.live]
        uses = {use for ctx in contexts for use in ctx.uses}
        self.stores.trim({ctx.request.tenant for ctx in contexts}, uses)
        running = {part for ctx in contexts for part in ctx.request.parts}
        for part in [part for part in [*self.brought][:-BROUGHT] if part not in running]:
            unused_models = {*self.brought.pop(part).values()} - {*self.models.values()}
            self.costs = {
                key: costs for key, costs in self.costs.items() if key[0] not in unused_models
            }

    def preempt_request(self, live_request: Live) -> bool:
        """Frees the request's rows, which are computed again when it goes on.

        False: it has rows that cannot be.
        """
        if not all(cache.recomputable for cache in live_request.caches.values()):
            return False
        if self.reuse is not None:
            self.reuse.keep_ended(live_request)
        live_request.free_rows()
        for open_ask in list(live_request.asks):
            branch = open_ask.ask.branch
            cache = self.cache_of(live_request, open_ask.ask.model, branch)
            open_ask.pending = cache.sync(live_request.ctx.branches[branch].tokens)
            if cache.beside is not None and open_ask.after is None:
                open_ask.after = states_first(self, live_request, branch)
        return True

    def fail_request(self, live_request: Live, error: BaseException) -> None:
        """Ends one request with an error."""
        if not isinstance(error, ForetellError):
            failed = RequestFailed(
                f"{live_request.ctx.request.name}: {type(error).__name__}: {error}"
            )
            failed.__cause__ = error
            error = failed
        live_request.error, live_request.reason = error, "error"
        self.end(live_request)
        self.events.append(Event(live_request.index, [], [], "error"))

    def status(self) -> dict[str, Any]:
        """Numbers of what it does and has done: see foretell.engine.status."""
        return engine_status(self)

    # --- one step

    @steady_step
    def step(self) -> list[Event]:
        """Lets every request run on to its next asks, then answers some of them by one forward."""
        self.admission(self)
        running = [live_request for live_request in self.live if not live_request.paused]
        for live_request in running:
            try:
                self._advance_request(live_request)
            except Exception as error:  # a user's processor or a strategy may raise anything
                self.fail_request(live_request, error)
        waiting = [
            open_ask
            for live_request in running
            for open_ask in live_request.asks
            if open_ask.after is None
        ]
        if self.reuse is not None:
            waiting = self.reuse.select_ready(waiting)
        if waiting:
            for open_ask in waiting:
                open_ask.waited = self.forwards - open_ask.since
            answer_asks(self, self.plan(waiting, self.costs))
        elif not self.events:
            self._wait_for_calls()
        events, self.events = self.events, []
        return events

    def _wait_for_calls(self) -> None:
        calls = [call for live_request in self.live for call in live_request.calls()]
        if calls:
            wait(calls, return_when=FIRST_COMPLETED)

    def _advance_request(self, live_request: Live) -> None:
        """Runs the request's tasks until each waits for something, or the request has ended."""
        for task in live_request.tasks:
            if task.call is not None and task.call.done():
                call, task.call = task.call, None
                error = call.exception()
                task.wake_task(None if error else call.result(), error)
        while live_request.reason is None:
            ready_task = next((task for task in live_request.tasks if task.ready), None)
            if ready_task is None:
                return
            self._resume_task(live_request, ready_task)
        self._finish_request(live_request)

    def _resume_task(self, live_request: Live, task: Task) -> None:
        """Sends a task its answer and handles the message that comes back."""
        answer, error = task.answer, task.error
        task.answer = task.error = None
        try:
            message = task.steps.throw(error) if error else task.steps.send(answer)
            task.ready = False
            handle_message(self, live_request, task, message)
        except StopIteration as end:
            self._end_task(live_request, task, end.value)
        except Exception as fault:
            self._end_task(live_request, task, error=fault)

    def _end_task(
        self, live_request: Live, task: Task, value: Any = None, error: Exception | None = None
    ) -> None:
        """A generator has returned or raised: its parent may go on, or the request has ended."""
        self._drop_task(live_request, task)
        parent = task.parent
        if parent is None:
            if error is not None:
                raise error
            branch = live_request.ctx.branches[live_request.result]
            live_request.reason = branch.reason or "stop"
            return
        parent.results[task.place] = value
        parent.running -= 1
        if error is not None or parent.first or not parent.running:
            for child in parent.children:
                if not child.ended:
                    self._drop_task(live_request, child)
            parent.children = []
            parent.wake_task(parent.results, error)

    def _drop_task(self, live_request: Live, task: Task) -> None:
        """Ends a task and those below it, and withdraws what they asked."""
        for child in task.children:
            if not child.ended:
                self._drop_task(live_request, child)
        live_request.asks = [
            open_ask for open_ask in live_request.asks if open_ask.task is not task
        ]
        live_request.tasks.remove(task)
        task.close()

    def _finish_request(self, live_request: Live) -> None:
        """The request is done: what was not streamed yet follows, and its rows are freed."""
        ctx = live_request.ctx
        ctx.branches[0] = ctx.branches[live_request.result]
        live_request.result = 0  # other threads may be reading the result
        ctx.branches = {0: ctx.branches[0]}
        if rest := ctx.branches[0].output[live_request.streamed :]:
            self.events.append(Event(live_request.index, rest, ["target"] * len(rest)))
        elapsed = time.perf_counter() - live_request.started
        ctx.stats.note_end(len(ctx.branches[0].output), elapsed)
        if self.reuse is not None:
            self.reuse.keep_ended(live_request)
        self.end(live_request)
        self.events.append(Event(live_request.index, [], [], live_request.reason))

    # --- forwards

    def costs_of(self, model: Model, backend: str = "", layers: Any = None, jobs: int = 1) -> Costs:
        """Costs of a model's forwards, by the backend that computes so many jobs or by another.

        `layers`: where only a part of them runs.
        """
        key = (model, backend or model.backend_of(jobs), layers)
        if key not in self.costs:
            self.costs[key] = Costs(model)
        return self.costs[key]

    def take_costs(self, model: Model, costs: Costs) -> None:
        """Costs that were measured beforehand, of the model's usual backend."""
        costs.freeze_curve()
        self.costs[model, model.usual_backend, None] = costs

    def cache_of(self, live_request: Live, name: str, branch: int) -> Cache:
        """The model's cache of this branch, made on first use."""
        key = (name, branch)
        if key not in live_request.caches:
            ctx, model = live_request.ctx, live_request.ctx.models[name]
            target_cache = (
                self.cache_of(live_request, "target", branch) if model.reads_target else None
            )
            cache = model.cache(ctx.request, target_cache)
            text = ctx.branches[branch].tokens
            if name == "target":
                if ctx.kept_taps:
                    cache.states = TappedStates(ctx.kept_taps)
                if ctx.request.policy is not None:
                    cache.use(ctx.request.policy, len(text) - len(ctx.branches[branch].output))
                prefix = ctx.request.prefix
                if prefix is not None and tuple(text[: prefix.end]) == prefix.tokens != tuple(text):
                    cache.adopt_segment(prefix)
            live_request.caches[key] = cache
        return live_request.caches[key]
