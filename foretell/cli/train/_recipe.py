"""The option `--recipe`: a file gives what the command line leaves out."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import typer

from foretell.errors import BadConfig

KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a text"),
    Path: ((str,), "a text"),
    list[str]: ((list,), "a list of texts"),
}


def recipe_option(trainer: str, name: str) -> Any:
    """The option of a command whose settings are the dataclass `name` of foretell.train.TRAINER."""

    def fill(context: typer.Context, given: str | None) -> str | None:
        if given is not None:
            from foretell.train import recipes

            path = recipes.find(given)
            fields = recipes.read(path)
            # What the command line has comes first, then this, then the options' defaults.
            context.default_map = _checked(context, path, fields)
            settings = getattr(import_module(f"foretell.train.{trainer}"), name)
            own = {key: value for key, value in fields.items() if hasattr(settings, key)}
            try:
                settings(**own)
            except BadConfig as error:
                raise BadConfig(f"{path}: {error}") from error
        return given

    return typer.Option(
        metavar="NAME|FILE.toml",
        is_eager=True,
        callback=fill,
        help="Settings of a run; options given beside it win.",
    )


def _checked(context: typer.Context, path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, if the command has them all and they are of its options' kinds."""
    command: Any = context.command.callback
    options = {
        name: get_args(parameter.annotation)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "recipe" and get_args(parameter.annotation)
    }
    for name, value in fields.items():
        shown = name.replace("_", "-")
        if name not in options:
            raise BadConfig(
                f"{path}: {shown} is no setting of `foretell train {context.info_name}`; it takes "
                f"{', '.join(options).replace('_', '-')}"
            )
        hint, about = options[name]
        kinds = [kind for kind in (hint, *get_args(hint)) if kind in KINDS]
        types, wanted = KINDS[kinds[0]]
        parts = value if isinstance(value, list) else ()
        right = isinstance(value, types) and all(isinstance(part, str) for part in parts)
        if not right or (isinstance(value, bool) and bool not in types):
            raise BadConfig(f"{path}: {shown}={value!r}: must be {wanted}")
        if about.min is not None and value < about.min:
            raise BadConfig(f"{path}: {shown}={value!r}: must be at least {about.min}")
    return fields


def in_use(context: typer.Context) -> dict[str, Any]:
    """All settings of the running command, as a recipe has them."""
    found: dict[str, Any] = {}
    for name, value in context.params.items():
        if name == "recipe" or value is None or value == []:
            continue
        found[name] = str(value) if isinstance(value, Path) else value
    return found
