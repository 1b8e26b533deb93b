"""What the commands write: answers to standard output, everything else to standard error.

Writing can fail, and the user must learn where it did: `refusals` turns an error of the operating
system into one line that names the place and the cure.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.progress import ProgressColumn
from rich.table import Column, Table

from foretell.errors import BadConfig, BadFile
from foretell.progress import COLUMNS, Bar

CURE = "free some space or choose another place"
WIDEST = 10_000  # of a table, in columns of a terminal
TEXT = 24  # widest cell that is no text to be put on several lines


messages = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def refusals(place: str, cure: str = CURE) -> Iterator[None]:
    """Raises BadFile, with the place and the cure, where the operating system refuses."""
    try:
        yield
    except BrokenPipeError:
        raise  # nothing is wrong: the reader has enough
    except OSError as error:
        raise BadFile(f"{place}: {error.strerror or error}; {cure}") from error


def emit(text: str, end: str = "\n") -> None:
    """Writes to standard output at once, so that a refusal is noticed where it happens."""
    with refusals("standard output"):
        print(text, end=end, flush=True)


def emit_json(document: Any) -> None:
    """Writes the document of `--json`."""
    emit(json_text(document))


def json_text(document: Any) -> str:
    """Text of a JSON document; numbers that are infinite or not a number are null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def show(*renderables: Any, **options: Any) -> None:
    """Writes rich texts and tables to standard output. A table is as wide as it has to be: where no
    terminal is, a row is a line; on one that is too narrow long texts alone go over several.
    """
    console = Console(highlight=False)
    wide_options = console.options.update(max_width=WIDEST)
    for renderable in renderables:
        if not isinstance(renderable, Table):
            continue
        needed_width = Measurement.get(console, wide_options, renderable).maximum
        for column in renderable.columns:
            parts = [
                Measurement.get(console, wide_options, p) for p in (column.header, *column.cells)
            ]
            column_width = max(part.maximum for part in parts)
            column.no_wrap = column_width <= TEXT or not console.is_terminal
            if not column.no_wrap:
                column.overflow = "fold"
                needed_width -= column_width - max(part.minimum for part in parts)
        console.width = max(console.width, needed_width)
    with refusals("standard output"):
        console.print(*renderables, **options)


def table(*columns: str | Column) -> Table:
    """An empty table without lines around it."""
    return Table(*columns, box=None, pad_edge=False)


def message(text: str) -> None:
    """Writes one line to standard error."""
    print(" ".join(text.split()), file=sys.stderr)


@contextlib.contextmanager
def warned_in_lines() -> Iterator[None]:
    """Writes warnings as one line on standard error, without the place in the program."""

    write_message = message

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        write_message(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = showwarning
        yield


def check_writable(option: str, path: Path | None, folders_are_made: bool = False) -> None:
    """Refuses, before the work, a file that could not be written after it. Raises BadConfig."""
    if path is None:
        return
    if path.is_dir():
        raise BadConfig(f"{option} {path}: a folder; name a file")
    folder = path.parent
    while folders_are_made and not folder.exists():
        folder = folder.parent
    if folder.is_file():
        raise BadConfig(f"{option} {path}: {folder} is a file, not a folder; name another")
    if not folder.is_dir():
        raise BadConfig(f"{option} {path}: its folder does not exist; make it, or name another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise BadConfig(f"{option} {path}: cannot be written by you; name another file")


def write_file(option: str, path: Path, text: str) -> None:
    """Writes a file whole or not at all. Raises BadFile where the operating system refuses."""
    with refusals(f"{option} {path}"):
        if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
            path.write_text(text, "utf-8")
            return
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text, "utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def progress_bar(still: bool = False, columns: Sequence[ProgressColumn] = COLUMNS) -> Bar:
    """A bar on standard error; where that is no terminal, a line every so often.

    `still`: it moves only when it is told to, so that no thread disturbs what is being timed.
    """
    return Bar(*columns, console=messages, transient=True, auto_refresh=not still)


def abandon(*streams: Any) -> None:
    """Sends what these streams still hold, and all that follows, to nowhere.

    Otherwise the interpreter tries once more to write it when it ends, and complains.
    """
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
