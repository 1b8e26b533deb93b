"""Executors are found by their files' names: `backends/openvino.py` is the executor `openvino`.

A file of this folder is an executor if it declares, at its top level, the kind of device it
computes on and its place among those of that device:

    DEVICE = "cpu"
    PRIORITY = 1

Listing reads these two lines without importing the file, so that a missing package cannot break
it. See `Runtime` for what else such a file holds.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch

from foretell.cache.buffers import Layout
from foretell.errors import BadConfig
from foretell.models.executor import Executor
from foretell.registry import PACKAGE

DECLARATION = re.compile(r'^DEVICE = "(\w+)"\n(?:.*\n)*?^PRIORITY = (\d+)$', re.MULTILINE)


class Runtime(Protocol):
    """An executor's module.

    `DEVICE`: the type of torch device it computes on. `PRIORITY`: of one device's executors the one
    with the highest number that takes a model computes it, and the one before is its fallback.
    `DTYPE`: what the weights that are not of 8 bits are converted to where it suits; None: they
    stay as they are. `WHOLE`: it computes every plain job itself, needs no fallback, and is tried
    before all others; it may `prepare` a model for itself.
    """

    DEVICE: str
    PRIORITY: int
    DTYPE: torch.dtype | None
    WHOLE: bool

    def suits(self, hf: Any, named: bool = False) -> bool:
        """Whether `auto` should try it on this transformers model.

        `named`: the user asks for it, so that only what rules out a better number format counts.
        """

    def prepare(self, hf: Any) -> None:
        """Brings the weights of a model that it suits into its own form, in place."""

    def make(
        self,
        loop: Any,
        layout: Layout,
        dtype: torch.dtype,
        vocab: int,
        fallback: Executor | None = None,
    ) -> Executor:
        """The executor of a model. Raises LookupError, with the reason, where it cannot be had."""


@cache
def declared() -> dict[str, tuple[str, int]]:
    """Of each executor by name its device and priority."""
    executors = {}
    for path in sorted((PACKAGE / "backends").glob("[!_]*.py")):
        match = DECLARATION.search(path.read_text("utf-8"))
        if match:
            executors[path.stem] = (match[1], int(match[2]))
    return executors


def names(device_type: str | None = None) -> list[str]:
    """The executors of this type of device, or of all, in the order they are tried."""
    executors = declared()
    matching = [name for name in executors if device_type in (None, executors[name][0])]
    return sorted(matching, key=lambda name: executors[name])


def device_of(name: str) -> str:
    """The type of device that this executor computes on. Raises BadConfig."""
    check(name)
    return declared()[name][0]


def check(name: str) -> None:
    """Raises BadConfig where no executor has this name."""
    if name not in declared():
        raise BadConfig.field("executor", name, f"one of {', '.join(names())}")


def load(name: str) -> Runtime:
    """Imports an executor's module. Raises BadConfig where there is none of this name."""
    check(name)
    module: Any = importlib.import_module(f"foretell.backends.{name}")
    runtime: Runtime = module
    return runtime


def candidates(hf: Any, device_type: str, wanted: str = "auto") -> Iterator[tuple[str, Runtime]]:
    """The executors to try for a transformers model on this type of device, in order: each is the
    fallback of the next.

    `wanted`: the name of the last one; `auto`: all of the device that suit the model.
    """
    for name in names(device_type):
        runtime = load(name)
        if not runtime.WHOLE and (name == wanted or runtime.suits(hf)):
            yield name, runtime
        if name == wanted:
            return


def whole(hf: Any, device_type: str, wanted: str = "auto") -> Iterator[tuple[str, Runtime]]:
    """Those to try before, which compute everything themselves; the arguments as above."""
    for name in reversed(names(device_type)):
        runtime = load(name)
        if runtime.WHOLE and (name == wanted or (wanted == "auto" and runtime.suits(hf))):
            yield name, runtime


def lineage(executor: Executor | None) -> list[str]:
    """The names of an executor and its fallbacks, the last fallback first: the order to make them
    in.
    """
    order: list[str] = []
    while executor is not None:
        order.insert(0, executor.name)
        executor = executor.fallback
    return order
