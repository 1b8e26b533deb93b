"""`foretell bench`: measures methods side by side, and other libraries beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from foretell.cli._loading import check_writes, fills_canvases, load_model
from foretell.cli._options import (
    Budget,
    Device,
    Draft,
    ModelOptions,
    Threads,
    check_method,
    split_numbers,
    split_parts,
    split_specs,
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
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.api.lm import LM

# Those of what a suite is run on.
FILES = ("prompts", "data", "schemas")
# Options that only suites take, and one of those that do.
OF_SUITES = {
    ("schemas", "limit"): "jsonschema",
    ("tasks", "budget"): "search",
    ("processor", "reward"): "repetition",
    ("data",): "search or parallel",
}


def bench(
    model: Annotated[
        str, typer.Option(help="One model or several with commas: `demo`, folders or hub ids.")
    ] = "demo",
    draft: Draft = None,
    dtype: Annotated[
        str,
        typer.Option(help="One or several: float32, bfloat16, float16, float64, int8, int4, auto."),
    ] = "auto",
    methods: Annotated[
        str,
        typer.Option(
            help="One or several; plain decoding is always among them. --suite parallel takes sets "
            "of settings too: orders, thresholds, factors, blocks."
        ),
    ] = "plain,auto",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="A file, or one of chat, summarisation, retrieval, translation, mathematics, "
            "code, edits. Repeatable; without it these seven. --suite repetition takes files.",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Other libraries, the first as baseline: transformers, llama.cpp, openvino, "
            "onnxruntime.genai, ctranslate2."
        ),
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    temperature: Annotated[str, typer.Option(help="One or several; 0 takes the best token.")] = "0",
    seed: Annotated[int, typer.Option(help="Of the samples and of the order of runs.")] = 0,
    rounds: Annotated[
        int, typer.Option(help="Rounds that are measured, after one to warm up.")
    ] = 3,
    warm_up: Annotated[
        int, typer.Option(help="Prompts of the round that warms up; 0: all of them.")
    ] = 0,
    requests: Annotated[
        str, typer.Option(help="One or several: how many prompts run in one batch.")
    ] = "1",
    contexts: Annotated[
        str, typer.Option(help="One or several: also with prompts of so many tokens.")
    ] = "",
    suite: Annotated[
        str | None,
        typer.Option(
            help="Tasks with figures of their own in place of prompts: jsonschema; search, what "
            "searches, samples and other methods solve, and what they compute for it; repetition, "
            "whether texts go in circles; monitor, whether names after dots exist; rewards, what "
            "rewards and choices by them are worth; parallel, what is lost where tokens are "
            "decoded together."
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Sorts of tasks for --suite search, one or several: functions, programs, sums, "
            "lists, instructions. Without it functions. For --suite parallel lists, puzzles, texts "
            "or single ones, such as shuffle; without it all."
        ),
    ] = "",
    budget: Budget = None,
    schemas: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="Schemas for --suite jsonschema. Repeatable; without it some are generated.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl|FOLDER",
            help="Your own copy of HumanEval or GSM8K, a file, for --suite search; of "
            "ParallelBench's files, a folder, for --suite parallel. Without it items are made.",
        ),
    ] = None,
    processor: Annotated[
        str,
        typer.Option(
            help="Processors that --suite repetition compares, several with commas: momentum, "
            "rpg:decay=0.8, a+b; or options of sampling, as in repetition_penalty=1.2."
        ),
    ] = "",
    reward: Annotated[
        str, typer.Option(help="Rewards that --suite rewards asks about pairs of answers.")
    ] = "",
    limit: Annotated[
        int,
        typer.Option(
            min=0,
            help="So many tasks of a suite, of jsonschema, repetition and parallel so many of each "
            "set or task; 0: all.",
        ),
    ] = 0,
    threads: Threads = None,
    device: Device = None,
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
    """Measure methods and other libraries side by side. The exit code is 1 if something failed."""
    to_stdout = json_out is not None and str(json_out) == "-"
    file = None if to_stdout else json_out
    check_writable("--json", file)
    check_writable("--html", html_out)
    specs = split_specs(methods, "--methods")
    suite_ways = () if suite is None else _suite_ways(suite)
    for spec in specs:
        if spec.partition(":")[0] not in suite_ways:
            check_method(spec)
    options: dict[str, Any] = {"prompts": prompts, "schemas": schemas, "limit": limit}
    options |= {
        "processor": processor,
        "reward": reward,
        "tasks": tasks,
        "budget": budget,
        "data": data,
    }
    suite_files = _suite_files(suite, options | {"html": html_out is not None})
    import torch

    from foretell import bench as runner
    from foretell.bench import report, suites

    settings = runner.Settings(
        models=split_parts(model),
        draft=draft,
        dtypes=split_parts(dtype),
        methods=tuple(specs),
        peers=split_parts(peers),
        max_new_tokens=max_new_tokens,
        temperatures=split_numbers("--temperature", temperature, float),
        seed=seed,
        rounds=rounds,
        warm_up=warm_up,
        requests=split_numbers("--requests", requests, int),
        contexts=split_numbers("--contexts", contexts, int),
        device=device,
        tasks=split_parts(tasks),
        budget=budget or "",
        processors=tuple(split_specs(processor, "--processor")) if processor else (),
        rewards=tuple(split_specs(reward, "--reward")) if reward else (),
    )
    if threads:
        torch.set_num_threads(threads)
    if suite is not None:
        suite_module = suites.load_suite(suite)
        items = suite_module.prepare(suite_files, settings, limit)
        document = suite_module.begin(settings, items, file)
        canvases = bool(getattr(suite_module, "CANVASES", False))
        models = ModelOptions("", draft, device)
        _run_bench(partial(suite_module.run, settings, items), models, document, file, canvases)
        if html_out is not None:
            write_file("--html", html_out, suite_module.html(document))
        if to_stdout:
            emit_json(document)
        else:
            for title, (head, *rows) in suite_module.tables(document):
                _print_table(title, head, rows)
        return _report_failures(suite_module.failures(document))
    sets = runner.read_sets(prompts or [])
    document = runner.begin_document(settings, sets, file)
    _run_bench(
        partial(runner.run_bench, settings, sets), ModelOptions("", draft, device), document, file
    )
    if html_out is not None:
        write_file("--html", html_out, report.html(document))
    if to_stdout:
        emit_json(document)
    else:
        for measured in report.tables(document):
            head, *rows = measured.text()
            _print_table(measured.title, head, rows)
    return _report_failures(report.failures(document))


def _suite_ways(suite: str) -> tuple[str, ...]:
    """Ways that a suite can compare beside the methods."""
    from foretell.bench import suites

    ways: tuple[str, ...] = getattr(suites.load_suite(suite), "WAYS", ())
    return ways


def _suite_files(suite: str | None, options: Mapping[str, Any]) -> list[str | Path]:
    """The files that a suite is run on. Raises BadConfig for options that it has no use for."""
    if suite is None:
        for names, suite_name in OF_SUITES.items():
            if any(options[name] for name in names):
                options_named = " and ".join(f"--{name}" for name in names)
                raise BadConfig(f"{options_named}: are of a suite; add --suite {suite_name}")
        return []
    from foretell.bench import suites

    taken_options = getattr(suites.load_suite(suite), "TAKES", ("schemas",))
    for name, value in options.items():
        if value and name not in (*taken_options, "limit"):
            raise BadConfig(f"--{name}: --suite {suite} has no use for it; leave it out")
    named_files = next((options[name] for name in FILES if name in taken_options), None) or []
    return [named_files] if isinstance(named_files, Path) else named_files


def _run_bench(
    work: Any,
    options: ModelOptions,
    document: dict[str, Any],
    file: Path | None,
    canvases: bool = False,
) -> None:
    """Does the work with a bar on the terminal, and keeps what is there in the file.

    `canvases`: whether it is for models that fill these, too.
    """
    from foretell import bench as runner

    with progress_bar(still=True) as progress:
        bar = progress.add_task("bench", total=None)

        def tell(activity: str, completed: int, total: int) -> None:
            progress.update(
                bar, description=activity, completed=completed, total=total, refresh=True
            )

        def load(name: str, number_format: str) -> LM:
            progress.stop()  # loading and measuring show their own
            try:
                lm = load_model(replace(options, model=name, dtype=number_format))
                if not (canvases and fills_canvases(lm)):
                    check_writes(lm, "bench", "generate, serve and --suite parallel run it")
                    lm.measure()
            finally:
                progress.start()
            return lm

        def save(measured: dict[str, Any]) -> None:
            if file is not None:
                with refusals(f"--json {file}"):
                    runner.write_document(measured, file)

        work(load, document, tell, save)


def _report_failures(failures: list[str]) -> int:
    """The exit code, once the failures have been told."""
    for failure in failures:
        message(f"failed: {failure}")
    return 1 if failures else 0


def _print_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    result_table = table(*head)
    for row in rows:
        result_table.add_row(*(Text(cell) for cell in row))
    show(Text(title, "bold"), soft_wrap=True)
    show(result_table)
