"""`foretell train infty`: cuts texts of long thoughts into rounds with summaries."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json, progress_bar
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.preferences.infty import Cut as Settings

if not TYPE_CHECKING:
    Settings = settings_of("preferences.infty", "Cut")


def infty(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    texts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Prompts, each with an `answer` that thinks.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="The file to write rounds to.")],
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Cut long thoughts into rounds, for a model that is to learn infty-think.

    The model writes the summaries between them.
    """
    check_writable("--out", out)
    from foretell.bench.prompts import read_prompts
    from foretell.train.preferences.infty import Cut, write_rounds

    cut = Cut(**dataclasses.asdict(settings))
    read_prompts(texts)
    lm = load_model(models, executors)
    with progress_bar() as progress, quiet():
        bar = progress.add_task("cutting", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        counts = write_rounds(lm, texts, out, cut, tell)
    if as_json:
        emit_json({"file": str(out), **counts})
        return 0
    left = counts["without_thoughts"] + counts["unfinished"]
    emit(f"{out}: {counts['rows']:,} rounds of {counts['texts']:,} texts, {left:,} left out")
    return 0
