"""`foretell lab`: what ways to draft and rules to verify accept on a model's own distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from foretell.cli._loading import check_writes, load_model
from foretell.cli._options import ModelOptions, Threads, split_numbers
from foretell.cli._output import (
    check_writable,
    emit,
    json_text,
    message,
    progress_bar,
    show,
    table,
    write_file,
)
from foretell.errors import BadConfig


def lab(
    models: ModelOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="A file, or one of chat, summarisation, retrieval, translation, mathematics, "
            "code, edits. Repeatable; without it these seven.",
        ),
    ] = None,
    temperature: Annotated[
        str, typer.Option(help="One or several, above 0, of the target and the draft model.")
    ] = "1",
    k: Annotated[int, typer.Option("--k", "-k", help="Tokens drafted at a place at most.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a drafted chain at most.")] = 4,
    positions: Annotated[int, typer.Option(help="Places in the text after each prompt.")] = 8,
    limit: Annotated[int, typer.Option(help="Prompts of each set, the first ones.")] = 2,
    draws: Annotated[int, typer.Option(help="Draws at each place of what has no closed form.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the texts and of all draws.")] = 0,
    threads: Threads = None,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="OUT|-",
            help="Write JSON: to this file beside the tables, or with - to standard output alone.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Write a bar chart.")] = None,
) -> int:
    """Measure what drafts and rules accept on a model's own distributions, beside the most
    possible.
    """
    to_stdout = json_out is not None and str(json_out) == "-"
    json_file = None if to_stdout else json_out
    if plot is not None and plot.suffix != ".svg":
        raise BadConfig(f"--plot {plot}: the plot is an SVG; give a name that ends in .svg")
    check_writable("--json", json_file)
    check_writable("--plot", plot)
    temperatures = split_numbers("--temperature", temperature, float)
    from foretell import lab as laboratory
    from foretell.bench import read_sets

    settings = laboratory.Settings(temperatures, k, length, positions, limit, draws, seed)
    sets = read_sets(prompts or [])
    if threads:
        import torch

        torch.set_num_threads(threads)
    lm = load_model(models, profile=False)
    check_writes(lm, "lab")
    if "draft" not in lm.models:
        raise BadConfig(
            f"--draft: {models.model} comes without a draft model; name a smaller model with the "
            "same tokenizer"
        )
    with progress_bar() as progress:
        bar = progress.add_task("lab", total=None)

        def tell(activity: str, completed: int, total: int) -> None:
            progress.update(bar, description=activity, completed=completed, total=total)

        report = laboratory.lab(lm, settings, sets, tell)
    document = json_text(report.to_dict())
    if json_file is not None:
        write_file("--json", json_file, document + "\n")
    if plot is not None:
        write_file("--plot", plot, report.svg())
    if to_stdout:
        emit(document)
        return 0
    for title, (head, *lines) in report.tables():
        result_table = table(*head)
        for line in lines:
            result_table.add_row(*(Text(cell) for cell in line))
        show(Text(title, "bold"))
        show(result_table)
    skipped = f"; {report.skipped:,} without a draft left out" if report.skipped else ""
    message(f"{report.places:,} places of {report.target}, drafts of {report.draft}{skipped}")
    return 0
