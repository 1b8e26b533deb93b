"""`foretell replay`: scores drafters on recorded answers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn

from foretell.cli._loading import load_tokenizer
from foretell.cli._options import Revision, split_specs
from foretell.cli._output import check_writable, emit, json_text, message, progress_bar, write_file
from foretell.errors import BadConfig
from foretell.progress import Bar


def replay(
    methods: Annotated[
        str, typer.Option(help="One method or several with commas; a+b drafts with both together.")
    ],
    text: Annotated[
        Path,
        typer.Option(metavar="FILE.jsonl", help="Recorded answers: lines of `prompt` and `text`."),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="`demo`, a folder with a tokenizer, or a hub id.")
    ] = "demo",
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="The questions, if --text holds answers in FastChat's shape."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Tokens drafted a step at most, unless the method says otherwise.")
    ] = 16,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only so many documents, the first ones.")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Drafters forget before each document what they have learnt."),
    ] = False,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="OUT|-",
            help="Write JSON: to this file beside the table, or with - to standard output alone.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Write a bar chart.")] = None,
    revision: Revision = None,
) -> int:
    """Score drafters on recorded answers: tokens committed a step. No model is run."""
    specs = split_specs(methods, "--methods")
    to_stdout = json_out is not None and str(json_out) == "-"
    json_file = None if to_stdout else json_out
    if plot is not None and plot.suffix != ".svg":
        raise BadConfig(f"--plot {plot}: the plot is an SVG; give a name that ends in .svg")
    check_writable("--json", json_file)
    check_writable("--plot", plot)
    from foretell.bench.recordings import Recordings
    from foretell.bench.replay import replay_documents as score

    recordings = Recordings(text, questions)
    text_tokenizer = load_tokenizer(tokenizer, revision)
    with _progress_bar() as progress:
        bar = progress.add_task("replay", total=recordings.size)

        def tell(documents_read: int) -> None:
            description = f"replay: {documents_read:,} documents"
            progress.update(bar, description=description, completed=recordings.read)

        documents = itertools.islice(recordings, limit)
        report = score(text_tokenizer, specs, documents, nodes, fresh=fresh, tell=tell)
    run_facts = {"tokenizer": tokenizer, "text": str(text), "skipped": recordings.skipped}
    document = json_text(report.to_dict() | run_facts)
    if json_file is not None:
        write_file("--json", json_file, document + "\n")
    if plot is not None:
        write_file("--plot", plot, report.svg())
    if recordings.skipped:
        message(
            f"warning: {recordings.skipped:,} answers left out: {questions} lacks their questions"
        )
    if to_stdout:
        emit(document)
    else:
        emit(report.text())
        message(f"{report.documents:,} documents; plain decoding makes 1.00 tokens a step")
    return 0


def _progress_bar() -> Bar:
    """Bar by bytes of the file, since the number of its documents is not known beforehand."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return progress_bar(columns=columns)
