"""Options that had another name: it is taken for one release, and one line says the new one."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

from foretell.errors import BadConfig, ForetellWarning

NEW_NAMES = {"rows": "guidance", "warp": "processor", "executor": "backend"}
F = TypeVar("F", bound=Callable[..., Any])


class RenamedOption(ForetellWarning):
    """An option was given by the name that it had before."""


def rename_options(
    options: Mapping[str, Any], known: Container[str], form: str = "{}="
) -> dict[str, Any]:
    """The options by their names of today, with a warning for each that was renamed.

    `known`: names of today that are options here. `form`: how they are written here. Raises
    BadConfig where both names are given.
    """
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        new_name = NEW_NAMES.get(name, name)
        if new_name not in known:
            new_name = name
        if new_name != name:
            if new_name in options:
                raise both_given(form.format(name), form.format(new_name))
            warn_of_old_name(form.format(name), form.format(new_name), 4)
        renamed[new_name] = value
    return renamed


def warn_of_old_name(old: str, new: str, stacklevel: int = 2) -> None:
    """Says that an option, as it is written, has another name now."""
    warnings.warn(f"{old} is {new} now; write {new}", RenamedOption, stacklevel)


def both_given(old: str, new: str) -> BadConfig:
    """The error of who gives an option by both of its names."""
    return BadConfig(f"{old} is {new} now, and both are given; leave {old} out")


def takes_old_names(function: F) -> F:
    """Lets a function be called with keywords that were renamed."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **rename_options(options, known))

    return call  # type: ignore[return-value]
