"""`foretell train dpo`: trains a target to prefer the better of two answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._output import emit
from foretell.cli._settings import settings_of
from foretell.cli.train._pairs import Device, Merged, Out, SaveEvery, Target, train_on_pairs
from foretell.cli.train._recipe import recipe_option

if TYPE_CHECKING:
    from foretell.train.preferences.dpo import TrainDpo as Settings

if not TYPE_CHECKING:
    Settings = settings_of("preferences.dpo", "TrainDpo")


def dpo(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("preferences.dpo", "TrainDpo")] = None,
    target: Target,
    pairs: Annotated[
        list[str],
        typer.Option(
            metavar="FILE.jsonl", help="Prompts, each with `chosen` and `rejected`. Repeatable."
        ),
    ],
    out: Out,
    merged: Merged = "bfloat16",
    device: Device = "cpu",
    save_every: SaveEvery = 300.0,
    settings: Settings,
) -> int:
    """Train a model to prefer the better of two answers, which makes it another model.

    Run again, it goes on where it was. `foretell train pairs` makes pairs.
    """
    from foretell.train.preferences.dpo import TrainDpo, read

    config = TrainDpo(**dataclasses.asdict(settings))
    files = [Path(name) for name in pairs]
    report = train_on_pairs(invocation, config, lambda lm: read(lm, files, config))
    before, after = report["before"], report["after"]
    emit(
        f"{out}: learnt from {report['pairs']:,} pairs; of {report['held_out']:,} others the "
        f"better answer became likelier more than the other in {after['preferred']:.1%}, and is "
        f"the likelier one in {after['likelier']:.1%}, before in {before['likelier']:.1%}"
    )
    return 0
