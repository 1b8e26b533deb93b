"""Lanes: who answers a model's asks while the target computes.

A method that drafts beside the target's forward writes its draft as a generator of asks, all to one
model and on one branch, and hands it to a lane. Who answers them changes no ask and no draw:

    inline    the engine, in its own thread, in forwards between the target's
    thread    a thread beside the engine's, on rows that belong to the lane
    stream    such a thread, with its kernels on a CUDA stream of their own
    process   a process that has the model a second time, see remote.py

Draws are keyed by what they decide (core/random.py), so a request has the same drafts in each. With
rows of logits that are the same to the last bit it has the same tokens; where the lane computes
other batches than the engine would, rounding may differ, as it does between any two batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foretell.core.model import Model
from foretell.core.refusals import unmet_capability
from foretell.core.types import Ask, Call, Message, Reply, Steps
from foretell.engine.remote import Remote
from foretell.errors import Unsupported
from foretell.ops.threads import threads_here

if TYPE_CHECKING:
    from foretell.core.context import Context

LANES = ("inline", "thread", "stream", "process")
CHUNK = 512  # tokens of a long text in a forward
Asking = Generator[Message, Any, Any]  # asks one model, and returns something


class Seat(Protocol):
    """Rows of one branch of the model at the side."""

    def answer(self, ask: Ask, tokens: Sequence[int]) -> Reply:
        """The rows that `ask` wants on a branch that has these tokens."""

    def drop(self) -> None:
        """Frees the rows."""


class OwnRows:
    """Rows of a model that this process has."""

    def __init__(self, model: Model, ctx: Context):
        self.model = model
        self.cache = model.cache(ctx.request)

    def answer(self, ask: Ask, tokens: Sequence[int]) -> Reply:
        is_complete = False
        while not is_complete:
            job, is_complete = self.cache.prepare(ask, tokens, CHUNK)
            reply = self.model.forward([job])[0]
        return reply

    def drop(self) -> None:
        self.cache.drop()


class Inline:
    """The engine answers."""

    def over(self, steps: Asking) -> Steps:
        """Yields what there is to wait for; returns what `steps` returns."""
        return (yield from steps)

    def close(self) -> None:
        """There is nothing to free: the engine has the rows."""


class Beside:
    """A thread answers, from a seat, while the engine goes on. Closed with its request."""

    def __init__(
        self,
        ctx: Context,
        name: str,
        seat: Seat,
        room: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        """`name`: of the model; `room`: what the thread computes inside of."""
        self.ctx = ctx
        self.name = name
        self.seat = seat
        self.room = room
        self.lock = Lock()  # of the two below
        self.busy = False
        self.closed = False

    def over(self, steps: Asking) -> Steps:
        """Yields what there is to wait for; returns what `steps` returns."""
        result, forwards = yield Call(partial(self._drive, steps, list(self.ctx.tokens)))
        for seconds in forwards:
            self.ctx.stats.note_call(self.name, seconds, step=False, elapsed=0.0)
        return result

    def close(self) -> None:
        """Frees the rows, at once or when the forward that runs has ended."""
        with self.lock:
            self.closed = True
            if not self.busy:
                self.seat.drop()

    def _drive(self, steps: Asking, tokens: Sequence[int]) -> tuple[Any, list[float]]:
        """Returns the result of `steps` and each forward's seconds. Runs in the lane's thread."""
        with self.lock:
            if self.closed:
                return None, []
            self.busy = True
        forwards: list[float] = []
        answer: Reply | None = None
        try:
            threads_here()
            with torch.inference_mode(), self.room():
                while not self.closed:
                    try:
                        ask = steps.send(answer)
                    except StopIteration as end:
                        return end.value, forwards
                    start_time = time.perf_counter()
                    answer = self._answer(ask, tokens)
                    forwards.append(time.perf_counter() - start_time)
            return None, forwards  # nobody waits for it any more
        finally:
            steps.close()
            with self.lock:
                self.busy = False
                if self.closed:
                    self.seat.drop()

    def _answer(self, ask: Any, tokens: Sequence[int]) -> Reply:
        assert isinstance(ask, Ask) and ask.model == self.name, "a lane answers one model's asks"
        assert ask.branch == self.ctx.branch, "a lane answers asks on one branch"
        model = self.ctx.models[self.name]
        lacking = unmet_capability(model, ask)
        if lacking is not None:
            capability, refused_value = lacking
            name = f"{self.ctx.request.name} ({refused_value})"
            raise Unsupported.missing_capability(
                name, model.name, capability, "use another method or model"
            )
        return self.seat.answer(ask, tokens)


Lane = Inline | Beside


def bring_remote(lane: str, models: Mapping[str, Model], name: str) -> Mapping[str, Any]:
    """Models that a method with this lane brings (Drafter.bring): the engine's one process.

    Raises Unsupported where the model cannot be made again in a process.
    """
    if lane != "process" or name not in models:
        return {}
    return {f"{name}@process": Remote.of(models[name])}


def open_lane(lane: str, ctx: Context, name: str) -> Lane:
    """The lane of one branch for the asks to model `name`. To be closed.

    Raises Unsupported where the model cannot be computed beside the engine.
    """
    model = ctx.models[name]
    if lane == "inline":
        return Inline()
    if lane == "process":
        remote: Any = ctx.models[f"{name}@process"]
        return Beside(ctx, name, remote.seat())
    if lane == "stream" and model.device.type != "cuda":
        raise Unsupported.missing_capability(
            "lane=stream", model.name, "a CUDA GPU, where models have streams", "use lane=thread"
        )
    seat = OwnRows(model, ctx)
    if model.reads_target or not getattr(seat.cache, "own_memory", True):
        need = "cache rows in a memory of their own"
        cure = "load it with backend='torch', or use lane=inline or process"
        raise Unsupported.missing_capability(f"lane={lane}", model.name, need, cure)
    if lane == "thread":
        return Beside(ctx, name, seat)
    return Beside(ctx, name, seat, partial(_on_stream, torch.cuda.Stream(model.device)))


class _on_stream:  # noqa: N801  # used as a function
    """Inside, kernels go to this stream. What they computed is there when it is left."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self.inside = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self.inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.stream.synchronize()
        self.inside.__exit__(*error)
