"""`foretell tune`: measures a model on this machine and keeps what it finds for `auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

from foretell.cli._loading import check_writes, load_model
from foretell.cli._options import Json, ModelOptions, Threads, check_method, split_specs
from foretell.cli._output import (
    check_writable,
    emit_json,
    message,
    progress_bar,
    show,
    table,
    write_file,
)
from foretell.errors import BadConfig


def tune(
    models: ModelOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Prompts of one kind of text, instead of those that ship. Repeatable.",
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods to measure instead of the usual ones.")
    ] = "",
    threads: Threads = None,
    kept: Annotated[
        bool, typer.Option("--show", help="Print what is kept, and measure nothing.")
    ] = False,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Delete all profiles of the model, and measure nothing."),
    ] = False,
    as_json: Json = False,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Write the same as a page.")
    ] = None,
) -> int:
    """Measure a model on this machine and keep what is found; the method `auto` goes by it."""
    check_writable("--html", html_out)
    specs = split_specs(methods, "--methods") if methods else []
    for spec in specs:
        check_method(spec)
    import torch

    from foretell.api import profiles
    from foretell.bench import read_sets, report, tuning

    if forget:
        return _forget_profiles(models)
    sets = read_sets(prompts or [])
    if threads:
        torch.set_num_threads(threads)
    lm = load_model(models)
    check_writes(lm, "tune")
    if kept:
        profile, _ = profiles.load_profile(lm.models, lm.path)
        if profile is None:
            raise BadConfig(
                f"--show: there is no profile of {models.model} here; leave --show out to measure"
            )
    else:
        with progress_bar(still=True) as progress:
            bar = progress.add_task("measuring", total=None)

            def tell(activity: str, completed: int, total: int) -> None:
                progress.update(
                    bar, description=activity, completed=completed, total=total, refresh=True
                )

            profile = tuning.tune_model(lm, sets, specs, model=models.model, tell=tell)
    if html_out is not None:
        write_file("--html", html_out, report.tuning_page(profile))
    if as_json:
        emit_json(profile)
    else:
        _print_profile(profile)
    failures = report.failures(profile["bench"])
    for failure in failures:
        message(f"failed: {failure}")
    return 1 if failures else 0


def _forget_profiles(models: ModelOptions) -> int:
    """Deletes the model's profiles, without loading it."""
    from foretell.api import profiles
    from foretell.loading.load import source_of

    count = profiles.forget_profiles(models.model, source_of(models.model))
    message(f"{count} profiles of {models.model} are forgotten; auto is its default")
    return 0


def _print_profile(profile: dict[str, Any]) -> None:
    """Tables of what was measured, and what follows from it."""
    from foretell.bench import report

    (measured,) = report.tables(profile["bench"])
    show(Text(measured.title, "bold"), soft_wrap=True)
    show(_speed_table(profile, measured))
    show("")
    show(_cost_table(profile))
    show("")
    kinds_of: dict[str, list[str]] = {}
    for kind, name in profile["best"].items():
        kinds_of.setdefault(name, []).append(kind)
    best_lines = [f"{name} on {', '.join(kinds)}" for name, kinds in kinds_of.items()]
    speed = profile["bench"]["bandwidth"]["bytes_per_s"] / 1e9
    show(f"memory: {speed:.1f} GB/s", soft_wrap=True)
    show("best: " + "; ".join(best_lines), soft_wrap=True)
    verdict = Text(f"auto stands for {profile['chosen']}.", "bold")
    show(verdict, report.explain_choice(profile), soft_wrap=True)
    message(f"kept in {profile['file']}; measured in {profile['seconds']:.0f} s")


def _speed_table(profile: dict[str, Any], measured: Any) -> Any:
    """Tokens per second of each method on each kind of text."""
    from foretell.bench import report

    means = profile["means"]
    speeds = table(Column("tokens/s", no_wrap=True), *measured.sets, "mean", "drafts")
    for name, cells in measured.rows.items():
        figures = []
        for kind in measured.sets:
            median = (cells[kind].get("tokens_per_s") or {}).get("median")
            figures.append("" if median is None else f"{median:,.0f}")
        figures.append(f"{means[name]:.2f}x" if name in means else "")
        drafted = report.mean_draft_size(list(cells.values()))
        figures.append("" if drafted is None else f"{drafted:.1f}")
        speeds.add_row(Text(name, "bold" if name == profile["chosen"] else ""), *figures)
    return speeds


def _cost_table(profile: dict[str, Any]) -> Any:
    """Milliseconds of a forward, by its tokens and by the tokens of the text before them."""
    (model,) = profile["bench"]["models"]
    by_rows = model["seconds"]
    sizes = next(iter(by_rows.values()))
    costs = table(Column("ms by tokens", no_wrap=True), *sizes)
    for rows, by_size in by_rows.items():
        figures = [f"{1000 * seconds:.2f}" for seconds in by_size.values()]
        costs.add_row(f"after {rows} tokens of text", *figures)
    return costs
