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
    """The module of an executor.

    `DEVICE`: the type of torch device it computes on. `PRIORITY`: of one device's executors the one
    with the highest number that takes a model computes it, and the one before is its fallback.
    `DTYPE`: what the weights that are not of 8 bits are converted to where it suits; None: they
    stay as they are. `WHOLE`: it computes every plain job itself, needs no fallback, and is tried
    before all others; it may prepare a model for itself.
    """

    DEVICE: str
    PRIORITY: int
    DTYPE: torch.dtype | None
    WHOLE: bool

    def suits_model(self, hf_model: Any, by_name: bool = False) -> bool:
        """Whether `auto` should try it on this transformers model.

        `by_name`: the user asks for it, so that only what rules out a better number format counts.
        """

    def prepare_model(self, hf_model: Any) -> None:
        """Brings the weights of a model that it suits into its own form, in place."""

    def make_executor(
        self,
        loop: Any,
        layout: Layout,
        dtype: torch.dtype,
        vocab_size: int,
        fallback: Executor | None = None,
    ) -> Executor:
        """The executor of a model. Raises LookupError, with the reason, where it cannot be had."""


@cache
def declared_executors() -> dict[str, tuple[str, int]]:
    """The device and the priority of every executor, by its name."""
    executors = {}
    for path in sorted((PACKAGE / "backends").glob("[!_]*.py")):
        match = DECLARATION.search(path.read_text("utf-8"))
        if match:
            executors[path.stem] = (match[1], int(match[2]))
    return executors


def executor_names(device_type: str | None = None) -> list[str]:
    """Names of the executors of this type of device, or of all, in the order they are tried."""
    executors = declared_executors()
    matching_names = [
        executor_name
        for executor_name in executors
        if device_type in (None, executors[executor_name][0])
    ]
    return sorted(matching_names, key=lambda executor_name: executors[executor_name])


def device_of(executor_name: str) -> str:
    """The type of device that this executor computes on. Raises BadConfig."""
    check_executor(executor_name)
    return declared_executors()[executor_name][0]


def check_executor(executor_name: str) -> None:
    """Raises BadConfig where no executor has this name."""
    if executor_name not in declared_executors():
        raise BadConfig.field("executor", executor_name, f"one of {', '.join(executor_names())}")


def load_runtime(executor_name: str) -> Runtime:
    """Imports an executor's module. Raises BadConfig where there is none of this name."""
    check_executor(executor_name)
    module: Any = importlib.import_module(f"foretell.backends.{executor_name}")
    runtime: Runtime = module
    return runtime


def candidate_runtimes(
    hf_model: Any, device_type: str, requested: str = "auto"
) -> Iterator[tuple[str, Runtime]]:
    """The executors to try for a transformers model on this type of device, in order: each is the
    fallback of the next.

    `requested`: the name of the last one; `auto`: all of the device that suit the model.
    """
    for executor_name in executor_names(device_type):
        runtime = load_runtime(executor_name)
        if not runtime.WHOLE and (executor_name == requested or runtime.suits_model(hf_model)):
            yield executor_name, runtime
        if executor_name == requested:
            return


def whole_runtimes(
    hf_model: Any, device_type: str, requested: str = "auto"
) -> Iterator[tuple[str, Runtime]]:
    """The executors to try before the others, which compute everything themselves; the arguments as
    of `candidate_runtimes`.
    """
    for executor_name in reversed(executor_names(device_type)):
        runtime = load_runtime(executor_name)
        if runtime.WHOLE and (
            executor_name == requested or (requested == "auto" and runtime.suits_model(hf_model))
        ):
            yield executor_name, runtime


def fallback_order(executor: Executor | None) -> list[str]:
    """Names of an executor and its fallbacks, the last fallback first: the order to make them."""
    executor_order: list[str] = []
    while executor is not None:
        executor_order.insert(0, executor.name)
        executor = executor.fallback
    return executor_order
