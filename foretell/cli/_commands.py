"""Commands are found by their files, as methods are.

`replay.py` holds the function `replay`, which is `foretell replay`. A file without a function of
its own name holds several commands: each of its functions, as `lm` in `train/run_folders.py`, which
is `foretell train lm`. Names that begin with an underscore are no commands.

A function's docstring is the help text, and its lines `--NAME: TEXT` are that of its options.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from foretell.core.renamed_options import NEW_NAMES, both_given, warn_of_old_name


def command_group(package: str, folder: Path, summary: str | None) -> typer.Typer:
    """The commands of a package's folder; a folder in it is a group of commands.

    `summary`: the group's help text.
    """
    group = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=summary
    )
    functions: dict[str, Callable[..., int]] = {}
    for path in sorted(folder.glob("[!_]*")):
        if path.suffix == ".py":
            functions |= command_functions(import_module(f"{package}.{path.stem}"))
        elif (path / "__init__.py").is_file():
            inner = import_module(f"{package}.{path.name}")
            build = functools.partial(command_group, inner.__name__, path, inner.__doc__)
            title = path.name.replace("_", "-")
            empty = typer.Typer(no_args_is_help=True, help=inner.__doc__)
            group.add_typer(empty, name=title, cls=lazy_group(build))
    for name in sorted(functions):
        make = group.command(name.replace("_", "-"), cls=RenamingCommand)
        make(with_fields(functions[name]))
    return group


class RenamingCommand(TyperCommand):
    """A command that takes its options by the names that they had before, too."""

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        for old, new in NEW_NAMES.items():
            option = parser._long_opt.get(f"--{new}")
            if option is not None:
                by_new, by_old = copy.copy(option), copy.copy(option)
                given: set[str] = set()
                for entry, name in ((by_new, new), (by_old, old)):
                    entry.process = functools.partial(_take, option, given, name, old, new)
                    parser._long_opt[f"--{name}"] = entry
        return parser


def _take(
    option: Any, given: set[str], name: str, old: str, new: str, value: Any, state: Any
) -> None:
    """Takes an option's value, given by its old or new name. Raises BadConfig for both."""
    given.add(name)
    if len(given) > 1:
        raise both_given(f"--{old}", f"--{new}")
    if name == old:
        warn_of_old_name(f"--{old}", f"--{new}")
    option.process(value, state)


def lazy_group(build: Callable[[], typer.Typer]) -> type[TyperGroup]:
    """A group whose commands are built when they are first asked for, so that others start
    without.
    """

    class LazyGroup(TyperGroup):
        built: dict[str, Any] | None = None

        @property
        def commands(self) -> Any:
            if self.built is None:
                group: Any = typer.main.get_group(build())
                self.built = group.commands
            return self.built

        @commands.setter
        def commands(self, value: Any) -> None:
            """Those of the empty group, which are none."""

    return LazyGroup


def command_functions(module: ModuleType) -> dict[str, Callable[..., int]]:
    """The function that has the module's name, or all public ones that the module defines."""
    functions: dict[str, Callable[..., int]] = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    title = module.__name__.rpartition(".")[2]
    return {title: functions[title]} if title in functions else functions


def with_fields(function: Callable[..., int]) -> Callable[..., int]:
    """The command with one option for each field of the dataclasses that it takes, and with the
    help that its docstring has for them.
    """
    signature = inspect.signature(function, eval_str=True)
    summary, helps = split_docstring(function)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _field_parameters(kind)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    unknown = helps.keys() - {parameter.name for parameter in parameters}
    assert not unknown, f"{function.__name__} has help for {unknown}, which are no options"
    parameters = [
        parameter.replace(annotation=_with_help(parameter.annotation, helps[parameter.name]))
        if parameter.name in helps
        else parameter
        for parameter in parameters
    ]

    @functools.wraps(function)
    def command(**values: Any) -> int:
        for name, kind in groups.items():
            names = [field.name for field in dataclasses.fields(kind)]
            values[name] = kind(**{field: values.pop(field) for field in names})
        return function(**values)

    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    command.__annotations__ = annotations | {"return": int}
    command.__doc__ = summary
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def split_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The help text of a command, and that of its options by their names."""
    summary, *parts = re.split(r"^--([\w-]+):", inspect.getdoc(function) or "", flags=re.M)
    names = [name.replace("-", "_") for name in parts[::2]]
    return summary.rstrip(), dict(zip(names, map(_one_line, parts[1::2]), strict=True))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _with_help(annotation: Any, text: str) -> Any:
    """The annotation of an option that has this help."""
    kind, option = annotation, typer.Option()
    if hasattr(annotation, "__metadata__"):
        kind, option = get_args(annotation)
    described = copy.copy(option)  # other commands share the option
    described.help = text
    return Annotated[kind, described]


def _field_parameters(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]
