"""How many threads compute, where two libraries share the processor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from foretell.native import library

F = TypeVar("F", bound=Callable[..., Any])

_turns: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()  # of each model
_making = threading.Lock()
_lowered: dict[int, int] = {}  # of each thread inside `torch_threads` the count it had before
_checked = threading.local()
_checked.count = True  # the main thread has its count before anybody can lower theirs


def threads_here() -> int:
    """Returns how many threads torch computes with when this thread calls it.

    torch gives a thread that it has not met the count that was set last, in whatever thread. Where
    that is one that another thread has lowered for a moment, the count from before replaces it.
    """
    thread_count = torch.get_num_threads()
    if not getattr(_checked, "count", False):
        _checked.count = True
        earlier_count = max(_lowered.copy().values(), default=thread_count)
        if thread_count < earlier_count:
            torch.set_num_threads(earlier_count)
            return earlier_count
    return thread_count


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Lets torch compute with `n` threads, inside, when this thread calls it."""
    earlier_count = torch.get_num_threads()
    if earlier_count == n:
        yield
        return
    thread_id = threading.get_ident()
    is_outermost = thread_id not in _lowered
    if is_outermost:
        _lowered[thread_id] = earlier_count
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(earlier_count)
        if is_outermost:
            del _lowered[thread_id]


@contextmanager
def library_alone() -> Iterator[None]:
    """Lets the C library compute with torch's threads, inside, and torch with one: where the two
    take turns, torch's threads go on spinning on the cores that the library needs.
    """
    with library.limit_threads(library.thread_count()), torch_threads(1):
        yield


def steady_step(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Runs an engine's step without gradients, in which torch has one thread if a backend
    computes.

    Torch's threads would go on spinning after the smallest parallel operation, for some ten
    milliseconds, on the cores that the backend's forwards need, which made these up to twice as
    slow. What torch computes in such a backend's place has all its threads again.
    """

    @wraps(step)
    @torch.inference_mode()
    def quiet(engine: Any) -> Any:
        if all(getattr(model, "backend", None) is None for model in engine.models.values()):
            return step(engine)
        thread_count = torch.get_num_threads()
        for model in engine.models.values():
            model.threads_wanted = thread_count
        with torch_threads(1):
            return step(engine)

    return quiet


def one_at_a_time(forward: F) -> F:
    """Wraps a model's forward so that a second thread waits until the first is through.

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
