"""Backends are found by their files' names: `backends/openvino.py` is the backend `openvino`.

A file of `foretell/backends/` is a backend if it declares, at its top level, the kind of device it
computes on and its place among those of that device:

    DEVICE = "cpu"
    PRIORITY = 1

Listing reads these two lines without importing the file, so that a missing package cannot break
it. See `BackendModule` for what else such a file holds.
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
from foretell.models.backend import Backend
from foretell.registry import PACKAGE

DECLARATION = re.compile(r'^DEVICE = "(\w+)"\n(?:.*\n)*?^PRIORITY = (\d+)$', re.MULTILINE)


class BackendModule(Protocol):
    """The module of a backend.

    `DEVICE`: the type of torch device it computes on. `PRIORITY`: of one device's backends the one
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

    def make_backend(
        self,
        loop: Any,
        layout: Layout,
        dtype: torch.dtype,
        vocab_size: int,
        fallback: Backend | None = None,
    ) -> Backend:
        """The backend of a model. Raises LookupError, with the reason, where it cannot be had."""


@cache
def declared_backends() -> dict[str, tuple[str, int]]:
    """The device and the priority of every backend, by its name."""
    backends = {}
    for path in sorted((PACKAGE / "backends").glob("[!_]*.py")):
        match = DECLARATION.search(path.read_text("utf-8"))
        if match:
            backends[path.stem] = (match[1], int(match[2]))
    return backends


def backend_names(device_type: str | None = None) -> list[str]:
    """Names of the backends of this type of device, or of all, in the order they are tried."""
    backends = declared_backends()
    matching_names = [
        backend_name
        for backend_name in backends
        if device_type in (None, backends[backend_name][0])
    ]
    return sorted(matching_names, key=lambda backend_name: backends[backend_name])


def device_of(backend_name: str) -> str:
    """The type of device that this backend computes on. Raises BadConfig."""
    check_backend(backend_name)
    return declared_backends()[backend_name][0]


def check_backend(backend_name: str) -> None:
    """Raises BadConfig where no backend has this name."""
    if backend_name not in declared_backends():
        raise BadConfig.field("backend", backend_name, f"one of {', '.join(backend_names())}")


def load_backend(backend_name: str) -> BackendModule:
    """Imports a backend's module. Raises BadConfig where there is none of this name."""
    check_backend(backend_name)
    found: Any = importlib.import_module(f"foretell.backends.{backend_name}")
    module: BackendModule = found
    return module


def candidate_backends(
    hf_model: Any, device_type: str, requested: str = "auto"
) -> Iterator[tuple[str, BackendModule]]:
    """The backends to try for a transformers model on this type of device, in order: each is the
    fallback of the next.

    `requested`: the name of the last one; `auto`: all of the device that suit the model.
    """
    for backend_name in backend_names(device_type):
        module = load_backend(backend_name)
        if not module.WHOLE and (backend_name == requested or module.suits_model(hf_model)):
            yield backend_name, module
        if backend_name == requested:
            return


def whole_backends(
    hf_model: Any, device_type: str, requested: str = "auto"
) -> Iterator[tuple[str, BackendModule]]:
    """The backends to try before the others, which compute everything themselves; the arguments as
    of `candidate_backends`.
    """
    for backend_name in reversed(backend_names(device_type)):
        module = load_backend(backend_name)
        if module.WHOLE and (
            backend_name == requested or (requested == "auto" and module.suits_model(hf_model))
        ):
            yield backend_name, module


def fallback_order(backend: Backend | None) -> list[str]:
    """Names of a backend and its fallbacks, the last fallback first: the order to make them."""
    backend_order: list[str] = []
    while backend is not None:
        backend_order.insert(0, backend.name)
        backend = backend.fallback
    return backend_order
