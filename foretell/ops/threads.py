"""How many threads compute, where two libraries share the processor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

F = TypeVar("F", bound=Callable[..., Any])

_turns: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()  # of each model
_making = threading.Lock()
_lowered: dict[int, int] = {}  # of each thread inside `torch_threads` the count it had before
_checked = threading.local()
_checked.count = True  # the main thread has its count before anybody can lower theirs


def threads_here() -> int:
    """How many threads torch computes with when this thread calls it.

    torch gives a thread that it has not met the count that was set last, in whatever thread. Where
    that is one that another thread has lowered for a moment, the count from before replaces it.
    """
    count = torch.get_num_threads()
    if not getattr(_checked, "count", False):
        _checked.count = True
        before = max(_lowered.copy().values(), default=count)
        if count < before:
            torch.set_num_threads(before)
            return before
    return count


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Inside, torch computes with `n` threads when this thread calls it."""
    before = torch.get_num_threads()
    if before == n:
        yield
        return
    thread = threading.get_ident()
    outermost = thread not in _lowered
    if outermost:
        _lowered[thread] = before
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if outermost:
            del _lowered[thread]


def steady(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An engine's step without gradients, in which torch has one thread if an executor computes.

    Torch's threads would go on spinning after the smallest parallel operation, for some ten
    milliseconds, on the cores that the executor's forwards need, which made these up to twice as
    slow. What torch computes in such an executor's place has all its threads again.
    """

    @wraps(step)
    @torch.inference_mode()
    def quiet(engine: Any) -> Any:
        if all(getattr(model, "executor", None) is None for model in engine.models.values()):
            return step(engine)
        threads = torch.get_num_threads()
        for model in engine.models.values():
            model.threads_wanted = threads
        with torch_threads(1):
            return step(engine)

    return quiet


def one_at_a_time(forward: F) -> F:
    """A model's forward for which a second thread waits until the first is through.

    Models that share weights (a view and its `base`) take turns with one another as well.
    """

    @wraps(forward)
    def in_turn(model: Any, *args: Any) -> Any:
        with _turn_of(model):
            return forward(model, *args)

    return in_turn  # type: ignore[return-value]


def _turn_of(model: Any) -> threading.RLock:
    while (base := getattr(model, "base", None)) is not None:
        model = base
    turn = _turns.get(model)
    if turn is None:
        with _making:
            turn = _turns.setdefault(model, threading.RLock())
    return turn
