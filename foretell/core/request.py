"""Requests to the engine, and the events that it answers with."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from foretell.core.types import Message, Reply, Sampling, Steps

if TYPE_CHECKING:
    from foretell.cache.policy import CachePolicy, Segment
    from foretell.core.memory_size import Room
    from foretell.core.random import Door
    from foretell.core.spending import Spending
    from foretell.core.tracing import TraceStep
    from foretell.core.tree import TokenTree


class Part(Protocol):
    """Members that a strategy and a source of rows share; see strategy.py and source.py."""

    models: tuple[str, ...] = ()  # besides the target
    needs: tuple[str, ...] = ()  # capabilities of the target, see model.py

    def bring(self, models: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns models of its own, by name: see Drafter.bring."""
        return {}


class Method(Part, Protocol):
    """A strategy.Strategy, which decides how tokens come about."""

    def run(self, ctx: Any) -> Steps: ...


class RowSource(Part, Protocol):
    """A source.Source."""

    def start(self, ctx: Any) -> Generator[Message, Any, Any]: ...

    def read_rows(
        self, ctx: Any, state: Any, tree: TokenTree, taps: Sequence[int], nodes: Any = None
    ) -> Generator[Message, Any, Reply]: ...


@dataclass
class Request:
    """A text to generate. `text(tokens)` decodes, for stop strings."""

    prompt: Sequence[int]
    strategy: Method
    sampling: Sampling = field(default_factory=Sampling)
    name: str = "method"
    text: Callable[[Sequence[int]], str] | None = None
    tenant: str = ""  # separates what requests share
    priority: int = 0  # higher ones run first
    budget: Spending | None = None  # what it may spend; None: as much as it takes
    deadline: float = math.inf  # by time.perf_counter(), when it ends done or not
    rng: Door | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)  # for caches: a source, images
    source: RowSource | None = None  # where the target's rows come from; None: from the target
    policy: CachePolicy | None = None  # of the target's caches
    prefix: Segment | None = None  # rows of the prompt's first tokens, made before
    trace: Callable[[TraceStep], None] | None = None  # told of every step
    streamed: bool = True  # whether somebody reads tokens as they come, and waits between them
    room: Room | None = None  # what a budget of memory leaves it

    @property
    def parts(self) -> list[Part]:
        """Parts of the request that may need models and capabilities."""
        return [self.strategy] if self.source is None else [self.source, self.strategy]


@dataclass
class Event:
    """Tokens that became final, by whom; `done`: why it ended, once. The rest is that of a Tell."""

    request: int
    tokens: list[int]
    sources: list[str]
    done: str | None = None
    placed: Sequence[tuple[int, int | None]] = ()
    length: int | None = None
