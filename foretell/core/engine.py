"""The loop: collect what live requests ask, run one packed forward, reply, commit, stop.

One request offline, many in a server, a toy model in a test: the same code. Draft models' asks are
answered first, so that the target's forward holds everybody. A request that fails ends with its
error and takes nobody along.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from foretell.core.cache import Cache, Job
from foretell.core.model import Model
from foretell.core.rng import Door, Rng
from foretell.core.sampling import Sampler
from foretell.core.stats import Stats, logprobs
from foretell.core.strategy import Strategy
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Kept, Reply, Sampling, Steps
from foretell.errors import BadConfig, ForetellError, PromptTooLong, RequestFailed, Unsupported
from foretell.ops.threads import steady
from foretell.policy.costs import Costs
from foretell.text import stopped

T = TypeVar("T")
CHUNK = 512  # prompt tokens a forward


@dataclass
class Request:
    """What to generate. `text(tokens)` decodes, for stop strings; `tenant` separates what requests
    share.
    """

    prompt: Sequence[int]
    strategy: Strategy
    sampling: Sampling = field(default_factory=Sampling)
    name: str = "method"
    text: Callable[[Sequence[int]], str] | None = None
    tenant: str = ""
    rng: Door | None = None


@dataclass
class Event:
    """Tokens that became final, `sources` beside them (one a token); `done`: the request's reason,
    once.
    """

    request: int
    tokens: list[int]
    sources: list[str]
    done: str | None = None


class Context:
    """What a strategy and a drafter may see of their request and its engine."""

    def __init__(self, engine: Engine, request: Request):
        target = engine.models["target"]
        self.request, self.models, self.costs = request, engine.models, engine.costs["target"]
        self.sampler = Sampler(request.sampling, request.prompt, engine.eos, target.vocab)
        self.rng: Door = request.rng or Rng(request.sampling.seed)
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self.branches: dict[int, list[int]] = {0: list(request.prompt)}
        self.limit = min(len(request.prompt) + request.sampling.max_new_tokens, target.context)
        self.stores, self.owner, self.live = engine.stores, request.strategy, engine.live
        self.timed = False  # whether measured time may decide what is drafted

    @property
    def tokens(self) -> list[int]:
        return self.branches[0]  # prompt and output; not to be changed

    @property
    def output(self) -> list[int]:
        return self.branches[0][len(self.request.prompt) :]

    @property
    def depth(self) -> int:
        """How deep a draft may be: one more token always follows it."""
        return self.limit - len(self.branches[0]) - 1

    def scoped(self, owner: Any) -> Context:
        """The same request, seen by a part of its method: what the part shares stands under its own
        config.
        """
        part = copy.copy(self)
        part.owner = owner
        return part

    def shared(self, make: Callable[[], T], name: str = "store") -> T:
        """What all requests of this engine and tenant with the same config share; made on first
        use.
        """
        key = (self.request.tenant, self.owner, name)
        if key not in self.stores:
            self.stores[key] = make()
        return self.stores[key]  # type: ignore[no-any-return]


@dataclass(eq=False)
class Live:
    """A request in flight."""

    index: int
    ctx: Context
    steps: Steps
    started: float
    caches: dict[tuple[str, int], Cache] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)  # open ones
    replies: list[Reply | None] = field(default_factory=list)
    single: bool = True  # the strategy yielded one Ask, not a list
    reason: str | None = None  # why branch 0 ended
    result: int = 0  # the branch that is the result
    answers: Sequence[tuple[list[int], float, str]] = ()  # see Finish
    told: int = 0  # output tokens that events have carried
    error: BaseException | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)


class Engine:
    """`models` must have "target". `eos`: ids that end a text. One thread at a time drives
    `step`.
    """

    def __init__(self, models: Mapping[str, Model], eos: Sequence[int] = ()):
        self.models, self.eos = dict(models), tuple(eos)
        self.costs = {name: Costs() for name in models}
        self.stores: dict[Hashable, Any] = {}
        self.live: list[Live] = []
        self.events: list[
            Event
        ] = []  # of the running step; if it is interrupted, the next one returns them
        self.count = 0

    def add(self, request: Request) -> Live:
        """Takes a request in. Raises Unsupported, PromptTooLong or BadConfig before any forward."""
        target, name, size = self.models["target"], request.name, len(request.prompt)
        if (
            not all(isinstance(t, int) and 0 <= t < target.vocab for t in request.prompt)
            or not size
        ):
            raise BadConfig(
                f"a prompt has at least one token, all of the vocabulary (0 to {target.vocab - 1})"
            )
        if size >= target.context:
            raise PromptTooLong(
                f"the prompt has {size} tokens and {target.name} holds {target.context}; shorten it"
            )
        for model in {*request.strategy.models} - {*self.models}:
            raise Unsupported.missing(
                name, target.name, f"a {model!r} model", f"load one: load(..., {model}=...)"
            )
        for need in {*request.strategy.needs} - target.caps:
            raise Unsupported.missing(
                name, target.name, f"the capability {need!r}", "choose another method"
            )
        if request.sampling.stop and request.text is None:
            raise BadConfig("stop: texts need a tokenizer; use stop_token_ids")
        ctx = Context(self, request)
        live = Live(self.count, ctx, request.strategy.run(ctx), time.perf_counter())
        self.count += 1
        live.reason = None if request.sampling.max_new_tokens else "length"
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
        live.steps.close()
        while live.caches:
            live.caches.popitem()[1].drop()
        if live in self.live:
            self.live.remove(live)

    @steady
    def step(self) -> list[Event]:
        """Lets every request run on to its next ask, then answers one model's asks with one
        forward.
        """
        events = self.events
        for live in list(self.live):
            if None in live.replies:
                continue
            try:
                self._advance(live, events)
            except (
                Exception
            ) as error:  # whatever a user's processor or a strategy raises ends this request alone
                failed = RequestFailed(f"{live.ctx.request.name}: {type(error).__name__}: {error}")
                failed.__cause__ = error
                live.error, live.reason = (
                    error if isinstance(error, ForetellError) else failed,
                    "error",
                )
                self.end(live)
                events.append(Event(live.index, [], [], "error"))
        waiting = [
            (live, i) for live in self.live for i, reply in enumerate(live.replies) if reply is None
        ]
        if chosen := [w for w in waiting if w[0].asks[w[1]].model != "target"] or waiting:
            self._answer(chosen)
            self.live.sort(
                key=lambda live: None not in live.replies
            )  # who could not take part now leads the next one
        self.events = []
        return events

    def _advance(self, live: Live, events: list[Event]) -> None:
        """Sends the replies in and handles messages until the next ask or the end."""
        ctx, branches = live.ctx, live.ctx.branches
        value: Any = (
            (live.replies[0] if live.single else list(live.replies)) if live.replies else None
        )
        live.replies = []
        while live.reason is None or value is not None:
            try:
                message = live.steps.send(value)
            except StopIteration:
                break
            value = None
            if isinstance(message, Commit):
                value = self._commit(live, message, events)
            elif isinstance(message, Fork):
                handles = range(max(branches) + 1, max(branches) + 1 + message.n)
                for handle in handles:
                    branches[handle] = list(branches[message.branch])
                    live.caches |= {
                        (m, handle): c.fork()
                        for (m, b), c in live.caches.items()
                        if b == message.branch
                    }
                value = list(handles)
            elif isinstance(message, Drop):
                del branches[message.branch]
                for key in [k for k in live.caches if k[1] == message.branch]:
                    live.caches.pop(key).drop()
            elif isinstance(message, Finish):
                live.result, live.reason, live.answers = (
                    message.branch,
                    message.reason,
                    message.answers,
                )
                break
            else:
                live.single = isinstance(message, Ask)
                live.asks = [message] if isinstance(message, Ask) else list(message)
                assert all(
                    self.models[a.model] and branches[a.branch][-1] == a.tree.tokens[0]
                    for a in live.asks
                )
                live.replies = [None] * len(live.asks)
                return
        ctx.branches = {0: branches[live.result]}
        if rest := ctx.output[live.told :]:
            events.append(Event(live.index, rest, ["target"] * len(rest)))
        ctx.stats.ended(len(ctx.output), time.perf_counter() - live.started)
        live.reason = live.reason or "stop"
        self.end(live)
        events.append(Event(live.index, [], [], live.reason))

    def _commit(self, live: Live, commit: Commit, events: list[Event]) -> Kept:
        """Cuts the tokens at the first end, stop or limit, before anything learns of them."""
        ctx, request = live.ctx, live.ctx.request
        branch, prompt = ctx.branches[commit.branch], len(request.prompt)
        kept, reason = 0, None
        for token in commit.tokens:
            branch.append(token)
            kept += 1
            if token in ctx.sampler.stops or stopped(
                request.text, request.sampling.stop, branch[prompt:]
            ):
                reason = "stop"
            elif len(branch) >= ctx.limit:
                reason = "length"
            if reason:
                break
        if request.sampling.logprobs is not None and commit.branch == 0:
            live.logprobs += logprobs(commit.rows[:kept], commit.tokens, request.sampling.logprobs)
        ctx.stats.committed(commit, kept, time.perf_counter() - live.started)
        live.reason = reason if commit.branch == 0 else live.reason
        if len(ctx.branches) == 1:  # with several, which of them is the answer is known at the end
            live.told += len(
                fresh := branch[prompt + live.told :]
            )  # other branches may just have been dropped
            events.append(
                Event(
                    live.index, fresh, ["target"] * (len(fresh) - kept) + [*commit.sources[:kept]]
                )
            )
        return Kept(commit.tokens[:kept], reason)

    def _answer(self, waiting: list[tuple[Live, int]]) -> None:
        """One forward for the first ask and all like it; a long prompt takes part with a chunk and
        stays open.
        """
        lead = waiting[0][0].asks[waiting[0][1]]
        model, asked, jobs = (
            self.models[lead.model],
            dict[tuple[Live, int], tuple[int, bool]](),
            list[Job](),
        )
        for live, i in waiting:
            ask, key = live.asks[i], (lead.model, live.asks[i].branch)
            if (ask.model, ask.taps) != (lead.model, lead.taps) or (live, ask.branch) in asked:
                continue
            if key not in live.caches:
                live.caches[key] = model.cache()
            job, whole = live.caches[key].prepare(ask, live.ctx.branches[ask.branch], CHUNK)
            if jobs and (job.layers, job.states is None) != (
                jobs[0].layers,
                jobs[0].states is None,
            ):
                continue
            asked[live, ask.branch] = (i, whole)
            jobs.append(job)
        start = time.perf_counter()
        replies = model.forward(jobs, lead.taps)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # or the seconds would be those of launching it
        seconds = time.perf_counter() - start
        self.costs[lead.model].note(
            model.width, seconds, sum(job.start for job in jobs) // len(jobs)
        )
        for live in dict.fromkeys(live for live, _ in asked):
            live.ctx.stats.called(lead.model, seconds)
        for ((live, _), (i, whole)), reply in zip(asked.items(), replies, strict=True):
            if whole:
                live.replies[i] = reply
