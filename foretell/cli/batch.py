"""`foretell batch`: a file of requests in, a file of results out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import load_model
from foretell.cli._options import ExecutorOptions, Method, ModelOptions, check_method
from foretell.cli._output import check_writable, message, messages
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.batch.answering import Shared
    from foretell.batch.progress import Meter
    from foretell.batch.results import Results
    from foretell.serve.errors import ApiError

SHOWN = 20  # requests without an answer that standard error tells of
GIGABYTE = 10**9


def batch(
    requests: Annotated[
        Path,
        typer.Option("--in", metavar="IN.jsonl", help="Requests in OpenAI's batch format."),
    ],
    results: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="OUT.jsonl",
            help="Results. If some are there already, the run goes on behind them.",
        ),
    ],
    models: ModelOptions,
    executors: ExecutorOptions,
    method: Method = "auto",
    memory: Annotated[float, typer.Option(help="Gigabytes that the texts in work may take.")] = 2.0,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Texts that are in work at once, at most.")
    ] = 64,
) -> int:
    """Answer a file of requests. A run that was interrupted goes on where it was."""
    from foretell.serve import check_installed

    check_installed("pydantic")
    if not memory > 0:
        raise BadConfig.field("--memory", memory, "above 0, in gigabytes")
    check_method(method)
    check_writable("--out", results)
    if results.exists() and requests.exists() and results.samefile(requests):
        raise BadConfig(f"--out {results}: that is the file of requests; name another")
    from foretell.batch.answering import answer, model_digest, prepare_rest
    from foretell.batch.progress import Meter, shown
    from foretell.batch.requests import read
    from foretell.batch.results import Results, Run
    from foretell.batch.running import Limits
    from foretell.serve.served import Served

    asked = read(requests)
    lm = load_model(models, executors)
    file = Results(results, Run(asked.digest, model_digest(lm, method)))
    told = 0

    def tell(line: int, error: ApiError) -> None:
        nonlocal told
        told += 1
        if told <= SHOWN:
            message(f"{requests}, line {line}: {error.message}")
        elif told == SHOWN + 1:
            message(f"more such lines follow: {results} has all of them")

    with file.opened():
        _say_what_is_there(file, len(asked))
        earlier = len(file.lines)
        try:
            with messages.status("reading the prompts"):
                served = Served(lm, models.model)
                ready = prepare_rest(asked, file, served, method, tell)
            meter = Meter(len(ready), len(file.lines))
            with shown(meter, messages) as tick:
                limits = Limits(int(memory * GIGABYTE), max_requests)
                shared = answer(lm, ready, file, limits, meter, tick, tell)
        except KeyboardInterrupt:
            message(
                f"interrupted: {len(file.lines):,} of {len(asked):,} are done; "
                "the same command goes on from there"
            )
            raise
        if len(file.lines) > earlier:
            _say_what_was_done(meter, shared)
    message(f"{len(asked) - file.failed:,} of {len(asked):,} answered, {file.failed:,} failed")
    return 1 if file.failed else 0


def _say_what_is_there(file: Results, total: int) -> None:
    if file.torn:
        message(f"{file.path}: its last line was not whole; that request is answered again")
    if file.lines:
        message(f"{len(file.lines):,} of {total:,} are done already")


def _say_what_was_done(meter: Meter, shared: Shared) -> None:
    from foretell.batch.progress import duration

    message(
        f"{meter.done:,} requests in {duration(meter.seconds)}: {meter.tokens:,} tokens, "
        f"{meter.tokens / meter.seconds:,.1f} tokens/s; {shared.ratio:.1%} of "
        f"{shared.prompt_tokens:,} prompt tokens were shared and not computed again"
    )
