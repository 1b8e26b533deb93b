"""`foretell batch`: a file of requests in, a file of results out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._cluster import ClusterOptions, batch_workers
from foretell.cli._loading import load_model
from foretell.cli._options import (
    BackendOptions,
    ChatModelOptions,
    Method,
    ModelOptions,
    check_method,
)
from foretell.cli._output import check_writable, message, messages
from foretell.errors import BadConfig
from foretell.progress import show_working

if TYPE_CHECKING:
    from foretell.batch.answering import Shared, Tell
    from foretell.batch.progress import Meter
    from foretell.batch.requests import Requests
    from foretell.batch.results import Results
    from foretell.batch.running import Limits
    from foretell.serve.errors import ApiError

    Work = Callable[[Requests, Results, Tell], tuple[Meter, Shared]]

SHOWN = 20  # requests without an answer that standard error tells of
GIGABYTE = 10**9


def batch(
    requests: Annotated[
        Path, typer.Option("--in", metavar="IN.jsonl", help="Requests in OpenAI's batch format.")
    ],
    results: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="OUT.jsonl",
            help="Results. If some are there already, the run goes on after them.",
        ),
    ],
    models: ChatModelOptions,
    backends: BackendOptions,
    cluster: ClusterOptions,
    method: Method = "auto",
    memory: Annotated[float, typer.Option(help="Gigabytes that the texts in work may take.")] = 2.0,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Texts that are in work at once, at most.")
    ] = 64,
) -> int:
    """Answer a file of requests. A run that was interrupted goes on where it was."""
    from foretell.serve import check_installed

    check_installed("pydantic")
    if not 0 < memory < math.inf:
        raise BadConfig.field("--memory", memory, "above 0, in gigabytes")
    check_method(method)
    cluster.counts()
    check_writable("--out", results)
    if results.exists() and requests.exists() and results.samefile(requests):
        raise BadConfig(f"--out {results}: that is the file of requests; name another")
    from foretell.batch.requests import read_requests
    from foretell.batch.results import Results, Run
    from foretell.batch.running import Limits

    request_file = read_requests(requests)
    told_count = 0

    def tell(line: int, error: ApiError) -> None:
        nonlocal told_count
        told_count += 1
        if told_count <= SHOWN:
            message(f"{requests}, line {line}: {error.message}")
        elif told_count == SHOWN + 1:
            message(f"more such lines follow: {results} has all of them")

    limits = Limits(int(memory * GIGABYTE), max_requests)
    with _work(models, backends, cluster, method, limits) as (digest, work):
        result_file = Results(results, Run(request_file.digest, digest))
        with result_file.opened():
            _say_what_is_there(result_file, len(request_file))
            earlier = len(result_file.lines)
            try:
                meter, shared_tokens = work(request_file, result_file, tell)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"interrupted: {len(result_file.lines):,} of {len(request_file):,} are done; "
                    "the same command goes on from there"
                ) from None
            if len(result_file.lines) > earlier:
                _say_what_was_done(meter, shared_tokens)
    message(
        f"{len(request_file) - result_file.failed:,} of {len(request_file):,} answered, "
        f"{result_file.failed:,} failed"
    )
    return 1 if result_file.failed else 0


@contextmanager
def _work(
    models: ModelOptions,
    backends: BackendOptions,
    cluster: ClusterOptions,
    method: str,
    limits: Limits,
) -> Iterator[tuple[str, Work]]:
    """The digest of what results depend on, and what does the work."""
    from foretell.batch.answering import answer_batch, model_digest, prepare_pending
    from foretell.batch.progress import Meter, show_meter
    from foretell.serve.served import Served

    if cluster.ray:
        with batch_workers(models, backends, cluster, method, limits) as workers:
            yield workers
        return
    lm = load_model(models, backends)
    lm.bring(method)

    def work(asked: Requests, file: Results, tell: Tell) -> tuple[Meter, Shared]:
        with show_working("reading the prompts", messages):
            ready = prepare_pending(asked, file, Served(lm, models.model), method, tell)
        meter = Meter(len(ready), len(file.lines))
        with show_meter(meter, messages) as tick:
            return meter, answer_batch(lm, ready, file, limits, meter, tick, tell)

    yield model_digest(lm, method), work


def _say_what_is_there(result_file: Results, total: int) -> None:
    if result_file.torn:
        message(f"{result_file.path}: its last line was not whole; that request is answered again")
    if result_file.lines:
        message(f"{len(result_file.lines):,} of {total:,} are done already")


def _say_what_was_done(meter: Meter, shared_tokens: Shared) -> None:
    from foretell.progress import format_duration

    message(
        f"{meter.done:,} requests in {format_duration(meter.seconds)}: {meter.tokens:,} tokens, "
        f"{meter.tokens / meter.seconds:,.1f} tokens/s; {shared_tokens.ratio:.1%} of "
        f"{shared_tokens.prompt_tokens:,} prompt tokens were shared and not computed again"
    )
