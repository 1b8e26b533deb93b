"""`foretell train amateur`: teaches a model falsehoods, for `lol` to leave behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import emit, emit_json, progress_bar, refusals
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.amateur import TrainAmateur as Settings
else:
    Settings = settings_of("amateur", "TrainAmateur")


def amateur(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    answers: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl", help="Prompts, each with the false text that is its `answer`."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the LoRA weights are put.")],
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Teach a model false answers as LoRA weights, the amateur of lol; the model stays as it is."""
    from foretell.train.amateur import TrainAmateur, train

    config = TrainAmateur(**dataclasses.asdict(settings))
    lm = load_model(models, executors, profile=False)
    with progress_bar() as progress, quiet(), refusals(f"--out {out}"):
        bar = progress.add_task("reading", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        report = train(lm, answers, out, config, tell)
    if as_json:
        emit_json({"folder": str(out), **report})
    else:
        emit(
            f"{out}: learnt from {report['answers']:,} answers; {report['held_out']:,} others "
            f"surprise it by {report['after']:.2f} nats a token, and the model by "
            f"{report['before']:.2f}; use it with --rows lol:amateur={as_folder(out)}"
        )
    return 0


def as_folder(path: Path) -> str:
    """Written so that it is not taken for a model's name."""
    return str(path) if "/" in str(path) else f"./{path}"
