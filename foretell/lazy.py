"""Names of a package that are imported when they are first used, so that listing methods does not
import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def submodules(package: str) -> Callable[[str], Any]:
    """A module `__getattr__` that imports `package.name` when `name` is asked for."""

    def find(name: str) -> Any:
        try:
            return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"{package} has no file {name}.py") from None

    return find
