"""`foretell fetch`: fetches a real model, or lists those that are known by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

from foretell.cli._options import Json
from foretell.cli._output import emit, emit_json, show, table
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.loading.names import Alias


def fetch(
    name: Annotated[
        str | None,
        typer.Argument(help="The model to fetch. Without it, the known models are listed."),
    ] = None,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean", help="Remove the packed weights that loads have kept; models stay."
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Fetch a real model where it is not here, and print where it is; or list the known ones."""
    from foretell.loading import fetch as fetching
    from foretell.loading import packed_files
    from foretell.loading.names import aliases, find_alias

    if clean:
        if name is not None:
            raise BadConfig(f"--clean takes no model, and {name!r} was given; leave it out")
        removed_bytes = packed_files.clean()
        folder = str(packed_files.packed_folder())
        if as_json:
            emit_json({"schema": "foretell.clean/1", "folder": folder, "bytes": removed_bytes})
        else:
            emit(f"{folder}: {removed_bytes / 1e9:.2f} GB of packed weights removed")
        return 0
    if name is not None:
        fetching.fetch(name)
        known_models = [find_alias(name)]
    else:
        known_models = list(aliases().values())
    if as_json:
        emit_json(
            {
                "schema": "foretell.fetch/1",
                "models": [_alias_document(alias) for alias in known_models],
            }
        )
    elif name is not None:
        emit(str(fetching.fetched_path(known_models[0])))
    else:
        rows = table("name", "what it is", "licence", Column("path", overflow="fold"))
        for alias in known_models:
            path = fetching.fetched_path(alias)
            shown_path = "not fetched" if path is None else str(path)
            rows.add_row(Text(alias.name, "bold"), alias.about, alias.licence, shown_path)
        show(rows)
    return 0


def _alias_document(alias: Alias) -> dict[str, Any]:
    from foretell.loading import fetch as fetching

    path = fetching.fetched_path(alias)
    folder = path.parent if path is not None and alias.run == "file" else path
    return dataclasses.asdict(alias) | {
        "path": None if path is None else str(path),
        "folder": None if folder is None else str(folder),
    }
