"""Options that had another name: it is taken for one release, and one line says the new one."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
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
            old, new = form.format(name), form.format(new_name)
            if new_name in options:
                raise BadConfig(f"{old} is {new} now, and both are given; leave {old} out")
            warnings.warn(f"{old} is {new} now; write {new}", RenamedOption, stacklevel=3)
        renamed[new_name] = value
    return renamed


def rename_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with its options by their names of today. Raises BadConfig for both."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names = [
        argument.removeprefix("--").partition("=")[0] if argument.startswith("--") else ""
        for argument in arguments[:end]
    ]
    new_names = list(rename_options(dict.fromkeys(filter(None, names)), NEW_NAMES.values(), "--{}"))
    by_name = dict(zip(dict.fromkeys(filter(None, names)), new_names, strict=True))
    renamed = [
        f"--{by_name[name]}{argument[len(name) + 2 :]}" if name else argument
        for name, argument in zip(names, arguments, strict=False)
    ]
    return [*renamed, *arguments[end:]]


def takes_old_names(function: F) -> F:
    """Lets a function be called with keywords that were renamed."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **rename_options(options, known))

    return call  # type: ignore[return-value]
