"""The loop: collect what live requests ask, run one packed forward, reply, commit, stop.

One request offline, many in a server, a toy model in a test: the same code. A scheduler decides who
takes part in the next forward. A request that fails ends with its error and takes nobody along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import torch

from foretell.core.cache import Cache
from foretell.core.context import Branch, Context, Event, Request, Stores
from foretell.core.job import Job
from foretell.core.live import Live, OpenAsk, Task
from foretell.core.model import Model, lacks
from foretell.core.tree import TokenTree
from foretell.core.types import (
    Ask,
    Call,
    Commit,
    Drop,
    Finish,
    Fork,
    Kept,
    Open,
    Reply,
    Together,
)
from foretell.errors import BadConfig, ForetellError, PromptTooLong, RequestFailed, Unsupported
from foretell.ops.states import TappedStates
from foretell.ops.threads import steady
from foretell.policy.costs import Costs
from foretell.policy.schedule import FairPlan, Plan
from foretell.stats import logprobs
from foretell.text import stopped

CALLS = 8  # outside calls that run at once
Answer = Callable[["Engine", Live, Task, Any], None]


class Engine:
    """`models` must have "target". `eos`: ids that end a text. One thread at a time drives `step`."""

    def __init__(
        self, models: Mapping[str, Model], eos: Sequence[int] = (), plan: Plan | None = None
    ):
        self.models = dict(models)
        self.eos = tuple(eos)
        self.plan = plan or FairPlan()
        self.costs: dict[tuple[Model, str, tuple[int, ...] | None], Costs] = {}
        self.stores = Stores()
        self.brought: dict[Any, Mapping[str, Model]] = {}  # of each method, the models it brought
        self.live: list[Live] = []
        # Of the running step; if it is interrupted, the next one returns them.
        self.events: list[Event] = []
        self.requests = 0
        self.forwards = 0
        self.pool: ThreadPoolExecutor | None = None

    # --- requests

    def add(self, request: Request) -> Live:
        """Takes a request in.

        Raises Unsupported, PromptTooLong or BadConfig before any forward.
        """
        models = self._check(request)
        ctx = Context(self, request, models)
        root = Task(request.strategy.run(ctx))
        live = Live(self.requests, ctx, root, time.perf_counter(), [root])
        self.requests += 1
        if not request.sampling.max_new_tokens:
            live.reason = "length"
        self.live.append(live)
        return live

    def _check(self, request: Request) -> Mapping[str, Model]:
        """The models of the request, its method's own included."""
        target = self.models["target"]
        prompt = request.prompt
        known = all(isinstance(t, int) and 0 <= t < target.vocab for t in prompt)
        if not known or not prompt:
            span = f"0 to {target.vocab - 1}"
            raise BadConfig(f"a prompt has at least one token, all of the vocabulary ({span})")
        if len(prompt) >= target.context:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and {target.name} holds {target.context}; "
                "shorten it"
            )
        if request.sampling.stop and request.text is None:
            raise BadConfig("stop: texts need a tokenizer; use stop_token_ids")
        models = dict(self.models)
        for part in (request.source, request.strategy):
            for need in {*part.needs} - target.caps:
                raise Unsupported.missing(
                    request.name, target.name, f"the capability {need!r}", "choose another method"
                )
            if part not in self.brought:
                self.brought[part] = part.bring(self.models)
            models |= self.brought[part]
            for name in {*part.models} - {*models}:
                cure = f'load one: load(..., models={{"{name}": ...}})'
                raise Unsupported.missing(request.name, target.name, f"a {name!r} model", cure)
        if request.policy is not None and not target.layout:
            raise Unsupported.missing(
                "a cache policy", target.name, "cache rows that it can change", "use another model"
            )
        return models

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
            self.stores.trim({other.ctx.request.tenant for other in self.live})

    def preempt(self, live: Live) -> bool:
        """Frees the request's rows, which are computed again when it goes on.

        False: it has rows that cannot be.
        """
        if not all(cache.recomputable for cache in live.caches.values()):
            return False
        live.free()
        return True

    def _fail(self, live: Live, error: BaseException) -> None:
        """Ends one request with an error."""
        if not isinstance(error, ForetellError):
            failed = RequestFailed(f"{live.ctx.request.name}: {type(error).__name__}: {error}")
            failed.__cause__ = error
            error = failed
        live.error = error
        live.reason = "error"
        self.end(live)
        self.events.append(Event(live.index, [], [], "error"))

    # --- one step

    @steady
    def step(self) -> list[Event]:
        """Lets every request run on to its next asks, then answers some of them by one forward."""
        for live in list(self.live):
            try:
                self._advance(live)
            except Exception as error:  # a user's processor or a strategy may raise anything
                self._fail(live, error)
        waiting = [entry for live in self.live for entry in live.asks if entry.after is None]
        if waiting:
            for entry in waiting:
                entry.waited = self.forwards - entry.since
            self._answer(self.plan(waiting, self.costs))
        elif self.live:
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
            task = next((task for task in live.tasks if task.ready), None)
            if task is None:
                return
            self._resume(live, task)
        self._finish(live)

    def _resume(self, live: Live, task: Task) -> None:
        """Sends a task its answer and handles the message that comes back."""
        answer, error = task.answer, task.error
        task.answer = task.error = None
        try:
            message = task.steps.throw(error) if error else task.steps.send(answer)
        except StopIteration as end:
            self._end_task(live, task, end.value)
            return
        task.ready = False
        kind = list if isinstance(message, list) else type(message)
        handle = self._handlers[kind]
        handle(self, live, task, message)

    def _end_task(self, live: Live, task: Task, value: Any) -> None:
        """A generator has returned: its parent may go on, or the request has ended."""
        live.tasks.remove(task)
        task.ended = True
        parent = task.parent
        if parent is None:
            branch = live.ctx.branches[live.result]
            live.reason = branch.reason or "stop"
            return
        parent.results[task.place] = value
        parent.running -= 1
        if parent.first or not parent.running:
            for child in parent.children:
                if not child.ended:
                    self._drop_task(live, child)
            parent.children = []
            parent.wake(parent.results)

    def _drop_task(self, live: Live, task: Task) -> None:
        for child in task.children:
            if not child.ended:
                self._drop_task(live, child)
        live.asks = [entry for entry in live.asks if entry.task is not task]
        live.tasks.remove(task)
        task.close()

    def _finish(self, live: Live) -> None:
        """The request is done: what was not streamed yet follows, and its rows are freed."""
        ctx = live.ctx
        ctx.branches = {0: ctx.branches[live.result]}
        live.result = 0
        rest = ctx.branches[0].output[live.streamed :]
        if rest:
            self.events.append(Event(live.index, rest, ["target"] * len(rest)))
        elapsed = time.perf_counter() - live.started
        ctx.stats.ended(len(ctx.branches[0].output), elapsed)
        self.end(live)
        self.events.append(Event(live.index, [], [], live.reason))

    # --- forwards

    def costs_of(self, model: Model, executor: str = "", layers: Any = None) -> Costs:
        """What forwards cost, of the executor that computes the model's ordinary ones or of another.

        `layers`: where only a part of them runs.
        """
        key = (model, executor or model.usual_executor, layers)
        return self.costs.setdefault(key, Costs())

    def _cache(self, live: Live, name: str, branch: int) -> Cache:
        """The model's cache of this branch, made on first use."""
        key = (name, branch)
        if key not in live.caches:
            ctx, model = live.ctx, live.ctx.models[name]
            beside = self._cache(live, "target", branch) if model.feeds else None
            cache = model.cache(ctx.request, beside)
            if name == "target":
                if ctx.kept_taps:
                    cache.states = TappedStates(ctx.kept_taps)
                if ctx.request.policy is not None:
                    cache.use(ctx.request.policy)
                prefix = ctx.request.prefix
                text = ctx.branches[branch].tokens
                if prefix is not None and tuple(text[: prefix.end]) == prefix.tokens != tuple(text):
                    cache.adopt(prefix)
            live.caches[key] = cache
        return live.caches[key]

    def _answer(self, planned: Sequence[tuple[OpenAsk, int]]) -> None:
        """One forward for these asks of one model; a long text takes part with a piece."""
        prepared: list[tuple[OpenAsk, Job, bool, int]] = []
        taken = set()  # one ask a cache
        for entry, tokens in planned:
            live, ask = entry.live, entry.ask
            key = (live, ask.model, ask.branch)
            if key in taken or live not in self.live:
                continue
            taken.add(key)
            try:
                cache = self._cache(live, ask.model, ask.branch)
                text = live.ctx.branches[ask.branch].tokens
                job, whole = cache.prepare(ask, text, max(1, tokens))
            except Exception as error:
                self._fail(live, error)
            else:
                prepared.append((entry, job, whole, tokens))
        prepared = [part for part in prepared if part[0].live in self.live]
        if not prepared:
            return
        model = prepared[0][0].model
        start = time.perf_counter()
        try:
            replies = model.forward([job for _, job, _, _ in prepared])
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)  # or the seconds would be those of launching
        except Exception as error:
            if len(prepared) == 1:
                self._fail(prepared[0][0].live, error)
                return
            for entry, _, _, tokens in prepared:  # whose fault it is shows when each runs alone
                self._answer([(entry, tokens)])
            return
        seconds = time.perf_counter() - start
        self.forwards += 1
        self._note(prepared, seconds)
        total = sum(len(job.tokens) for _, job, _, _ in prepared)
        for (entry, job, whole, _), reply in zip(prepared, replies, strict=True):
            reply.seconds = seconds * len(job.tokens) / total
            if whole:
                self._reply(entry, reply)
            else:
                entry.pending -= len(job.tokens)

    def _note(self, prepared: Sequence[tuple[OpenAsk, Job, bool, int]], seconds: float) -> None:
        """Takes note of what a forward took, for its model's costs and the requests' statistics."""
        entry = prepared[0][0]
        model = entry.model
        rows = sum(job.start for _, job, _, _ in prepared) // len(prepared)
        costs = self.costs_of(model, model.computed_by, entry.ask.layers)
        costs.note(model.width, seconds, rows)
        lives: dict[Live, bool] = {}  # whether it was a step: a whole one of a text of its own
        for entry, _, whole, _ in prepared:
            live, ask = entry.live, entry.ask
            step = whole and entry.task is not None and FairPlan.is_step(entry)
            step = step and not live.ctx.branches[ask.branch].quiet
            lives[live] = lives.get(live, False) or step
        for live, step in lives.items():
            elapsed = time.perf_counter() - live.started
            live.ctx.stats.called(entry.ask.model, seconds, step, elapsed)

    def _reply(self, entry: OpenAsk, reply: Reply) -> None:
        """Answers an ask; its task goes on when it has all replies."""
        live, task = entry.live, entry.task
        live.asks.remove(entry)
        for other in live.asks:
            if other.after is entry:
                other.after = None
        if task is None:
            return
        task.replies[entry.place] = reply
        if None not in task.replies:
            task.wake(task.replies[0] if task.single else list(task.replies))

    # --- messages

    def _on_ask(self, live: Live, task: Task, message: Ask | list[Ask]) -> None:
        task.single = isinstance(message, Ask)
        asks = [message] if isinstance(message, Ask) else message
        task.replies = [None] * len(asks)
        task.ready = not asks
        task.answer = [] if not asks else None
        for place, ask in enumerate(asks):
            model = live.ctx.models[ask.model]
            branch = live.ctx.branches[ask.branch]
            assert branch.tokens[-1] == ask.tree.tokens[0], "a tree hangs below the last token"
            lacking = lacks(model, ask)
            if lacking is not None:
                what, given = lacking
                name = f"{live.ctx.request.name} ({given})"
                raise Unsupported.missing(name, model.name, what, "use another method or model")
            entry = OpenAsk(live, model, ask, task, place, self.forwards)
            cache = self._cache(live, ask.model, ask.branch)
            entry.pending = cache.sync(branch.tokens)
            if cache.beside is not None:
                entry.after = self._states_first(live, ask.branch)
            live.asks.append(entry)

    def _states_first(self, live: Live, branch: int) -> OpenAsk | None:
        """An ask that makes the target take in the text whose states another model feeds on."""
        tokens = live.ctx.branches[branch].tokens
        cache = self._cache(live, "target", branch)
        cache.commit(tokens)
        lacking = len(tokens) - 1 - cache.length
        if not lacking:
            return None
        ask = Ask(TokenTree(tokens[-1]), "target", branch, rows=())
        entry = OpenAsk(live, live.ctx.models["target"], ask, None, 0, self.forwards, lacking)
        live.asks.append(entry)
        return entry

    def _on_commit(self, live: Live, task: Task, commit: Commit) -> None:
        """Cuts the tokens at the first end, stop or limit, before anything learns of them."""
        ctx, request = live.ctx, live.ctx.request
        branch = ctx.branches[commit.branch]
        kept = 0
        reason = None
        for token in commit.tokens:
            branch.tokens.append(token)
            branch.output.append(token)
            kept += 1
            if branch.quiet:
                continue
            if token in branch.sampler.stops:
                reason = "stop"
            elif stopped(request.text, request.sampling.stop, branch.output):
                reason = "stop"
            elif len(branch.tokens) >= branch.limit:
                reason = "length"
            if reason:
                break
        branch.reason = reason
        if not branch.quiet:
            if request.sampling.logprobs is not None:
                k = request.sampling.logprobs
                branch.logprobs += logprobs(commit.rows[:kept], commit.tokens, k)
            ctx.stats.committed(commit, kept, time.perf_counter() - live.started)
            self._stream(live, commit, kept)
        task.wake(Kept(commit.tokens[:kept], reason))

    def _stream(self, live: Live, commit: Commit, kept: int) -> None:
        """Tells of new tokens. With several texts, which is the answer is known at the end only."""
        spoken = [branch for branch in live.ctx.branches.values() if not branch.quiet]
        if len(spoken) > 1:
            return
        fresh = spoken[0].output[live.streamed :]  # other branches may just have been dropped
        live.streamed += len(fresh)
        sources = [*["target"] * (len(fresh) - kept), *commit.sources[:kept]]
        self.events.append(Event(live.index, fresh, sources))

    def _on_open(self, live: Live, task: Task, message: Open) -> None:
        ctx = live.ctx
        tokens = list(message.tokens)
        model = ctx.models[message.model]
        if not tokens or len(tokens) >= model.context:
            raise PromptTooLong(
                f"a branch of {len(tokens)} tokens for {model.name}, which holds 1 to "
                f"{model.context - 1}; give it another text"
            )
        limit = model.context
        if not message.quiet:
            limit = min(limit, len(tokens) + ctx.request.sampling.max_new_tokens)
        sampler = ctx.branches[ctx.branch].sampler.beside(tokens)
        task.wake(self._new_branch(live, Branch(tokens, [], sampler, limit, message.quiet)))

    def _new_branch(self, live: Live, branch: Branch) -> int:
        handle = live.next_branch
        live.next_branch += 1
        live.ctx.branches[handle] = branch
        return handle

    def _on_fork(self, live: Live, task: Task, message: Fork) -> None:
        handles = []
        for _ in range(message.n):
            handle = self._new_branch(live, live.ctx.branches[message.branch].fork())
            handles.append(handle)
            for (model, branch), cache in list(live.caches.items()):
                if branch == message.branch:
                    live.caches[model, handle] = cache.fork()
        for handle in handles:  # what feeds on the target's cache feeds on that of its own branch
            for (model, branch), cache in live.caches.items():
                if branch == handle and cache.beside is not None:
                    cache.beside = live.caches["target", handle]
        task.wake(handles)

    def _on_drop(self, live: Live, task: Task, message: Drop) -> None:
        del live.ctx.branches[message.branch]
        for key in [key for key in live.caches if key[1] == message.branch]:
            live.caches.pop(key).drop()
        task.wake()

    def _on_together(self, live: Live, task: Task, message: Together) -> None:
        children = [Task(steps, task, place) for place, steps in enumerate(message.steps)]
        task.children = children
        task.results = [None] * len(children)
        task.running = len(children)
        task.first = message.first
        live.tasks += children
        if not children:
            task.wake([])

    def _on_call(self, live: Live, task: Task, message: Call) -> None:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(CALLS, thread_name_prefix="foretell-call")
        task.call = self.pool.submit(message.function)

    def _on_finish(self, live: Live, task: Task, message: Finish) -> None:
        live.result = message.branch
        live.reason = message.reason
        live.answers = message.answers

    _handlers: Mapping[type, Answer] = {
        Ask: _on_ask,
        list: _on_ask,
        Commit: _on_commit,
        Open: _on_open,
        Fork: _on_fork,
        Drop: _on_drop,
        Together: _on_together,
        Call: _on_call,
        Finish: _on_finish,
    }
