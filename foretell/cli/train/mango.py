"""`foretell train mango`: trains a target to write code with comments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._output import emit
from foretell.cli._settings import settings_of
from foretell.cli.train._pairs import Device, Merged, Out, SaveEvery, Target, train_on_pairs
from foretell.cli.train._recipe import recipe_option

if TYPE_CHECKING:
    from foretell.train.preferences.mango import TrainMango as Settings

if not TYPE_CHECKING:
    Settings = settings_of("preferences.mango", "TrainMango")


def mango(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("preferences.mango", "TrainMango")] = None,
    target: Target,
    code: Annotated[
        list[str],
        typer.Option(
            metavar="SOURCE",
            help="stdlib, a folder or a file of Python, or a .jsonl of prompts, each with code as "
            "its `answer`. Repeatable.",
        ),
    ],
    out: Out,
    merged: Merged = "bfloat16",
    device: Device = "cpu",
    save_every: SaveEvery = 300.0,
    settings: Settings,
) -> int:
    """Train a model to write code with comments sooner than without, which makes it another model.

    Run again, it goes on where it was. Of Python files it learns the functions with docstrings.
    """
    from foretell.train.preferences.mango import TrainMango, read

    config = TrainMango(**dataclasses.asdict(settings))
    report = train_on_pairs(invocation, config, lambda lm: read(lm, code, config))
    before, after = report["before"], report["after"]
    emit(
        f"{out}: learnt from {report['pairs']:,} answers; a token of {report['held_out']:,} others "
        f"surprises it by {after['commented']:.3f} nats with comments (before "
        f"{before['commented']:.3f}) and by {after['uncommented']:.3f} without (before "
        f"{before['uncommented']:.3f})"
    )
    return 0
