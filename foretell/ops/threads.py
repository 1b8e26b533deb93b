"""How many threads compute, where two libraries share the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Torch computes with `n` threads inside."""
    before = torch.get_num_threads()
    if before != n:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if before != n:
            torch.set_num_threads(before)


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
            model.asked = threads
        with torch_threads(1):
            return step(engine)

    return quiet
