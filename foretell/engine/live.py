"""A request in flight: its tasks, each a generator and what it waits for, and its caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from foretell.cache.cache import Cache
from foretell.core.context import Branch, Context, Shared
from foretell.core.model import Model
from foretell.core.request import Event
from foretell.core.types import Ask, Reply, Steps
from foretell.errors import BadConfig


@dataclass(eq=False)
class OpenAsk:
    """An ask that waits for its forward."""

    live: Live
    model: Model
    ask: Ask
    task: Task | None  # None: what another ask has to wait for
    place: int  # among the task's asks
    since: int  # the engine's count of forwards when it was asked, or last took part in one
    pending: int = 0  # committed tokens that its cache lacks
    waited: int = 0  # forwards since then
    after: OpenAsk | None = None  # which has to be answered first

    @property
    def for_target(self) -> bool:
        """Whether a whole forward of the target answers it, its rest, or all there will be."""
        runs_fully = self.ask.layers is None or self.ask.lasting or self.ask.states is not None
        return self.ask.model == "target" and runs_fully

    @property
    def size(self) -> int:
        """Tokens to compute, when all rows of the tree are new."""
        return self.pending + self.ask.size

    @property
    def cached_length(self) -> int:
        """Tokens that its cache has taken in."""
        return len(self.live.ctx.branches[self.ask.branch].tokens) - 1 - self.pending


@dataclass(eq=False)
class Task:
    """A generator of a request. It can go on unless it waits for replies, children or a call."""

    steps: Steps
    parent: Task | None = None
    place: int = 0  # among the parent's children
    answer: Any = None  # to be sent next
    error: BaseException | None = None  # to be thrown instead
    ready: bool = True
    single: bool = True  # it yielded one Ask, not a list
    replies: list[Reply | None] = field(default_factory=list)
    children: list[Task] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)  # of the children
    running: int = 0  # children that have not ended
    first: bool = False  # it waits for the first child only
    call: Future[Any] | None = None
    ended: bool = False

    def wake_task(self, answer: Any = None, error: BaseException | None = None) -> None:
        """Lets it go on."""
        self.answer, self.error, self.ready = answer, error, True

    def close(self) -> None:
        """Ends it, its children first."""
        self.ended = True
        for child in self.children:
            if not child.ended:
                child.close()
        if self.call is not None:
            self.call.cancel()
        self.steps.close()


@dataclass(eq=False)
class Live:
    """A request in flight."""

    index: int
    ctx: Context
    root: Task
    started: float
    tasks: list[Task] = field(default_factory=list)
    asks: list[OpenAsk] = field(default_factory=list)
    caches: dict[tuple[str, int], Cache] = field(default_factory=dict)
    result: int = 0  # the branch that is the result
    reason: str | None = None  # why the request ended
    answers: Sequence[tuple[list[int], float, str]] = ()  # see types.Finish
    streamed: int = 0  # output tokens that events have carried
    next_branch: int = 1
    error: BaseException | None = None
    paused: bool = True  # it waits for its turn: it has no rows, and takes part in no step

    @property
    def logprobs(self) -> list[tuple[float | None, list[tuple[int, float]]]]:
        """Log-probabilities of the result's tokens: see stats.row_logprobs."""
        return self.ctx.branches[self.result].logprobs

    def new_branch(self, branch: Branch) -> int:
        """Takes a branch in; returns its handle. Raises BadConfig where there are too many."""
        max_branches = self.ctx.engine.admission.branches
        if max_branches is not None and len(self.ctx.branches) >= max_branches:
            raise BadConfig(f"method: at most {max_branches} texts side by side; ask for fewer")
        handle = self.next_branch
        self.next_branch += 1
        self.ctx.branches[handle] = branch
        return handle

    def calls(self) -> Iterator[Future[Any]]:
        return (task.call for task in self.tasks if task.call is not None)

    def free_rows(self) -> None:
        """Lets go of all rows."""
        while self.caches:
            self.caches.popitem()[1].drop()


class Host(Shared, Protocol):
    """The part of an engine that messages and forwards use."""

    live: list[Any]
    events: list[Event]
    forwards: int
    pool: ThreadPoolExecutor | None

    def cache_of(self, live_request: Live, name: str, branch: int) -> Cache: ...

    def fail_request(self, live_request: Live, error: BaseException) -> None: ...
