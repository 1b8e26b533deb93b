"""`foretell train acceptance-head`: trains the head that ends the drafts of `specdec-pp`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json, progress_bar
from foretell.cli._settings import settings_of
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.train.acceptance import TrainHead as Settings
else:
    Settings = settings_of("acceptance", "TrainHead")


def acceptance_head(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="The file to write the head to.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts; the head learns from the answers."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Texts to learn from: stdlib, a folder, a .jsonl or a text file. Repeatable.",
        ),
    ] = None,
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Train the head by which specdec-pp ends its drafts; both models stay as they are."""
    if (prompts is None) == (not text):
        raise BadConfig("give either --prompts FILE.jsonl or --text SOURCE to learn from")
    check_writable("--out", out)
    from foretell.bench.prompts import read_prompts
    from foretell.train.acceptance import Text, TrainHead, answers, pieces, train

    config = TrainHead(**dataclasses.asdict(settings))
    asked = read_prompts(prompts) if prompts is not None else []
    lm = load_model(models, executors, profile=False)
    with progress_bar() as progress, quiet():
        bar = progress.add_task("reading", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        texts: Iterable[Text] = pieces(lm, _documents(text or []), config)
        if prompts is not None:
            texts = answers(lm, asked, config, tell)
        report = train(lm, texts, out, config, tell)
    if as_json:
        emit_json({"file": str(out), **report})
    else:
        emit(_summary(out, report))
    return 0


def _documents(sources: Sequence[str]) -> Iterator[str]:
    from foretell.train.corpus import documents

    for source in sources:
        for _, document in documents(source):
            # A .jsonl file may hold half a character, which no tokenizer takes.
            yield document.encode("utf-8", "replace").decode()


def _summary(out: Path, report: dict[str, Any]) -> str:
    return (
        f"{out}: learnt from {report['examples']:,} drafted tokens; of {report['held_out']:,} "
        f"others {report['accepted']:.0%} are accepted, and the head ranks an accepted one above a "
        f"rejected one in {report['auc']:.1%} of cases (the draft model's confidence: "
        f"{report['confidence_auc']:.1%}); use it with --method specdec-pp:head={out}"
    )
