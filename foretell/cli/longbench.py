"""`foretell longbench`: what cache policies cost in quality on long contexts, by budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from foretell.cli._loading import check_writes, load_model
from foretell.cli._options import (
    BackendOptions,
    ModelOptions,
    Threads,
    check_named,
    split_numbers,
    split_parts,
)
from foretell.cli._output import (
    check_writable,
    emit_json,
    message,
    progress_bar,
    refusals,
    show,
    table,
    write_file,
)


def longbench(
    models: ModelOptions,
    backends: BackendOptions,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A cache policy, as in snapkv or h2o:every=16. Repeatable; the whole cache "
            "(none) is always among them.",
        ),
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(
            help="One or several, for every policy: rows, or shares of the length: 128,10%. "
            "Without them those of the specs."
        ),
    ] = "",
    lengths: Annotated[
        str, typer.Option(help="One or several: tokens of a context and its question.")
    ] = "2048,4096",
    tasks: Annotated[
        str,
        typer.Option(
            help="One or several: needles, keys; pairs, affixes, variables (strings); facts, "
            "choices (meaning); shots, numbers (the whole of a context); perplexity."
        ),
    ] = "needles,keys",
    modes: Annotated[
        str,
        typer.Option(
            help="How questions are put. requests: by themselves, after a context that was read "
            "before; turns: in one conversation; single: each in one prompt with the context."
        ),
    ] = "requests,turns",
    limit: Annotated[int, typer.Option(help="Contexts of each task and length.")] = 5,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What perplexity is measured on; without it made sentences."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the contexts.")] = 0,
    threads: Threads = None,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="OUT|-",
            help="Write the JSON document; a file that an interrupted run left is continued.",
        ),
    ] = None,
    html_out: Annotated[
        Path | None,
        typer.Option("--html", metavar="OUT.html", help="Write a report with plots, one file."),
    ] = None,
) -> int:
    """Measure answers, time and rows of cache policies. The exit code is 1 if something failed."""
    to_stdout = json_out is not None and str(json_out) == "-"
    file = None if to_stdout else json_out
    check_writable("--json", file)
    check_writable("--html", html_out)
    for spec in kv or []:
        if spec != "none":
            check_named("kv", spec)
    import torch

    from foretell import longbench as bench
    from foretell.bench.document import write_document

    settings = bench.Settings(
        model=models.model,
        dtype=models.dtype,
        device=models.device,
        backend=backends.backend,
        kv=tuple(kv or ()),
        budgets=split_parts(budgets),
        tasks=split_parts(tasks),
        modes=split_parts(modes),
        lengths=split_numbers("--lengths", lengths, int),
        limit=limit,
        seed=seed,
        text=None if text is None else str(text),
    )
    if threads:
        torch.set_num_threads(threads)
    document = bench.begin_document(settings, file)
    lm = load_model(models, backends, profile=False)
    check_writes(lm, "longbench")

    def save(measured: dict[str, Any]) -> None:
        if file is not None:
            with refusals(f"--json {file}"):
                write_document(measured, file)

    with progress_bar(still=True) as progress:
        bar = progress.add_task("longbench", total=None)

        def tell(activity: str, completed: int, total: int) -> None:
            progress.update(
                bar, description=activity, completed=completed, total=total, refresh=True
            )

        bench.run_units(lm, settings, document, tell, save)
    if html_out is not None:
        write_file("--html", html_out, bench.render_html(document))
    if to_stdout:
        emit_json(document)
    else:
        for title, (head, *rows) in bench.result_tables(document):
            result_table = table(*head)
            for row in rows:
                result_table.add_row(*(Text(cell) for cell in row))
            show(Text(title, "bold"), soft_wrap=True)
            show(result_table)
    failures = bench.failure_lines(document)
    for failure in failures:
        message(f"failed: {failure}")
    return 1 if failures else 0
