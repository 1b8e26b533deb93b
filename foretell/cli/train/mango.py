"""`foretell train mango`: trains a target to write code with comments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, message, refusals
from foretell.cli.train._recipe import in_use, recipe_option
from foretell.cli.train._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.mango import TrainMango as Settings

if not TYPE_CHECKING:
    Settings = settings_of("mango", "TrainMango")


def mango(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("mango", "TrainMango")] = None,
    target: Annotated[str, typer.Option(help="The model to be trained.")],
    code: Annotated[
        list[str],
        typer.Option(
            metavar="SOURCE",
            help="stdlib, a folder or a file of Python, or a .jsonl of prompts, each with code as "
            "its `answer`. Repeatable.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; results are OUT/lora and OUT/model.")
    ],
    merged: Annotated[
        str, typer.Option(help="Number format of OUT/model, the new model; empty: no OUT/model.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where it is trained: cpu, cuda, cuda:1.")] = "cpu",
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Train a model to write code with comments sooner than without, which makes it another model.

    Run again, it goes on where it was. Of Python files it learns the functions with docstrings.
    """
    import foretell
    from foretell.fetching import resolve
    from foretell.train.mango import TrainMango, read, train
    from foretell.train.preferences import check, plan

    config = TrainMango(**dataclasses.asdict(settings))
    resolve(target)
    with quiet(), refusals(f"--out {out}"):
        lm = foretell.load(target, dtype="float32", executor="torch", device=device)
        check(lm, merged)
        reader = read(lm, code, config)
        lm.measure()
        message(plan(reader.parts()[0], config, lm.engine.costs_of(lm.models["target"])))
        made_of = in_use(invocation)
        report = train(lm, reader, out, config, save_every, merged=merged, recipe=made_of)
    before, after = report["before"], report["after"]
    emit(
        f"{out}: learnt from {report['pairs']:,} answers; a token of {report['held_out']:,} others "
        f"surprises it by {after['commented']:.3f} nats with comments (before "
        f"{before['commented']:.3f}) and by {after['uncommented']:.3f} without (before "
        f"{before['uncommented']:.3f})"
    )
    return 0
