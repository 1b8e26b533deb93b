"""What commands have in common that read texts with a model and write one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import progress_bar

TextOption = Annotated[
    list[str],
    typer.Option(
        metavar="SOURCE",
        help="Texts to read: stdlib, a folder, a .jsonl or a text file. Repeatable.",
    ),
]
Tell = Callable[[str, int, int | None], None]


def texts_of(sources: Sequence[str]) -> Iterator[str]:
    """The documents of all sources. Raises BadConfig for one that is not there."""
    from foretell.train.corpus import documents

    for source in sources:
        for _, document in documents(source):
            yield document.encode("utf-8", "replace").decode()


@contextmanager
def told(first: str) -> Iterator[Tell]:
    """A progress bar, and what tells it how far the work is."""
    with progress_bar() as progress, quiet():
        bar = progress.add_task(first, total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        yield tell
