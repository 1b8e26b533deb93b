"""`foretell bench`: measures methods side by side, and other libraries beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from foretell.cli._loading import load_model
from foretell.cli._options import (
    Device,
    Draft,
    ModelOptions,
    Threads,
    check_method,
    numbers,
    several,
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
from foretell.cli._suites import run_suite, suites
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.api import LM


def bench(
    model: Annotated[
        str,
        typer.Option(help="One model or several with commas: `demo`, folders or hub ids."),
    ] = "demo",
    draft: Draft = None,
    dtype: Annotated[
        str,
        typer.Option(help="One or several: float32, bfloat16, float16, float64, int8, int4, auto."),
    ] = "auto",
    methods: Annotated[
        str, typer.Option(help="One or several; plain decoding is always among them.")
    ] = "plain,auto",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="A file, or one of chat, summarisation, retrieval, translation, mathematics, "
            "code, edits. Repeatable; without it these seven.",
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
    requests: Annotated[
        str, typer.Option(help="One or several: how many prompts run in one batch.")
    ] = "1",
    contexts: Annotated[
        str,
        typer.Option(help="One or several: also with prompts of so many tokens."),
    ] = "",
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Measure how good answers are instead, on tasks of: {', '.join(suites())}.",
        ),
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="Tasks of a suite. Without it, as many as it has by itself.")
    ] = None,
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
    if suite is not None:
        asked: dict[str, tuple[Any, Any]] = {
            "methods": (methods, "plain,auto"),
            "prompts": (prompts, None),
            "peers": (peers, ""),
            "max_new_tokens": (max_new_tokens, 96),
            "temperature": (temperature, "0"),
            "seed": (seed, 0),
            "rounds": (rounds, 3),
            "requests": (requests, "1"),
            "contexts": (contexts, ""),
            "items": (items, None),
            "html": (html_out, None),
        }
        given: dict[str, Any] = {
            name: value for name, (value, usual) in asked.items() if value != usual
        }
        if "temperature" in given:
            given["temperature"] = one("--temperature", temperature)
        if threads:
            set_threads(threads)
        return run_suite(suite, ModelOptions(model, draft, device, dtype), given, json_out)
    if items is not None:
        raise BadConfig("--items: is for --suite; leave it out")
    to_stdout = json_out is not None and str(json_out) == "-"
    file = None if to_stdout else json_out
    check_writable("--json", file)
    check_writable("--html", html_out)
    specs = split_specs(methods, "--methods")
    for spec in specs:
        check_method(spec)
    import torch

    from foretell.measure import bench as runner
    from foretell.measure import report

    settings = runner.Settings(
        models=several(model),
        draft=draft,
        dtypes=several(dtype),
        methods=tuple(specs),
        peers=several(peers),
        max_new_tokens=max_new_tokens,
        temperatures=numbers("--temperature", temperature, float),
        seed=seed,
        rounds=rounds,
        requests=numbers("--requests", requests, int),
        contexts=numbers("--contexts", contexts, int),
        device=device,
    )
    sets = runner.read_sets(prompts or [])
    if threads:
        torch.set_num_threads(threads)
    document = runner.begin(settings, sets, file)
    with progress_bar(still=True) as progress:
        bar = progress.add_task("bench", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total, refresh=True)

        def load(name: str, number_format: str) -> LM:
            progress.stop()  # loading and measuring show their own
            try:
                lm = load_model(ModelOptions(name, draft, device, number_format))
                lm.measure()
            finally:
                progress.start()
            return lm

        def save(measured: dict[str, Any]) -> None:
            if file is not None:
                with refusals(f"--json {file}"):
                    runner.write(measured, file)

        runner.bench(settings, sets, load, document, tell, save)
    if html_out is not None:
        write_file("--html", html_out, report.html(document))
    if to_stdout:
        emit_json(document)
    else:
        _print_tables(report.tables(document))
    failures = report.failures(document)
    for failure in failures:
        message(f"failed: {failure}")
    return 1 if failures else 0


def one(option: str, text: str) -> float:
    """The number of an option that may have several. Raises BadConfig."""
    found = numbers(option, text, float)
    if len(found) != 1:
        raise BadConfig(f"{option} {text}: a suite takes one; name one")
    return found[0]


def set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _print_tables(tables: list[Any]) -> None:
    for measured in tables:
        head, *rows = measured.text()
        shown = table(*head)
        for row in rows:
            shown.add_row(*(Text(cell) for cell in row))
        show(Text(measured.title, "bold"), soft_wrap=True)
        show(shown)
