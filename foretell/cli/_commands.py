"""Commands are found by their files, as methods are.

`replay.py` holds the function `replay`, which is `foretell replay`; `train/lm.py` holds `lm`, which
is `foretell train lm`. Files and folders whose names begin with an underscore are no commands.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import typer


def command_group(package: str, folder: Path, about: str | None) -> typer.Typer:
    """The commands of a package's folder; a folder in it is a group of commands.

    `about`: the group's help text.
    """
    group = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help=about,
    )
    for path in sorted(folder.glob("[!_]*")):
        title = path.stem.replace("_", "-")
        if path.suffix == ".py":
            module = import_module(f"{package}.{path.stem}")
            group.command(title)(with_fields(getattr(module, path.stem)))
        elif (path / "__init__.py").is_file():
            inner = import_module(f"{package}.{path.name}")
            group.add_typer(command_group(inner.__name__, path, inner.__doc__), name=title)
    return group


def with_fields(function: Callable[..., int]) -> Callable[..., int]:
    """The command with one option for each field of the dataclasses that it takes."""
    signature = inspect.signature(function, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**given: Any) -> int:
        for name, kind in groups.items():
            names = [field.name for field in dataclasses.fields(kind)]
            given[name] = kind(**{field: given.pop(field) for field in names})
        return function(**given)

    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    command.__annotations__ = annotations | {"return": int}
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _parameters(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]
