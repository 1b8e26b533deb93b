"""`foretell train pairs`: makes pairs of a model's own answers, of which one is better."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json, message, progress_bar
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.preferences.pairs import Search as Settings

if not TYPE_CHECKING:
    Settings = settings_of("preferences.pairs", "Search")


def pairs(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    prompts: Annotated[
        list[str], typer.Option(metavar="FILE.jsonl", help="Prompts to be answered. Repeatable.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="The file to write them to.")],
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Make pairs of answers for dpo: the model's own, and how it refined it. Run again, it goes on.

    Of each prompt the file has a line, which is without answers where no refinement passed.
    """
    check_writable("--out", out)
    from foretell.bench.prompts import read_prompts
    from foretell.train.preferences.pairs import Search, known, write_pairs

    search = Search(**dataclasses.asdict(settings))
    asked = [prompt for name in prompts for prompt in read_prompts(name)]
    known(out, asked)
    lm = load_model(models, executors)
    message(
        f"{len(asked):,} prompts, each with an answer of at most {search.max_new_tokens:,} tokens, "
        "its judgements and its refinements"
    )
    with progress_bar() as progress, quiet():
        bar = progress.add_task("searching", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        rows = write_pairs(lm, asked, out, search, tell)
    found = sum(row["chosen"] is not None for row in rows)
    failed = [row["error"] for row in rows if "error" in row]
    if as_json:
        emit_json({"file": str(out), "prompts": len(rows), "pairs": found, "failed": len(failed)})
        return 0
    if failed:
        message(f"warning: {len(failed)} prompts failed, the first with: {failed[0]}")
    emit(f"{out}: {found:,} pairs of {len(rows):,} prompts; foretell train dpo --pairs {out}")
    return 0
