"""`foretell train dpo`: trains a target to prefer the better of two answers."""

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
    from foretell.train.dpo import TrainDpo as Settings

if not TYPE_CHECKING:
    Settings = settings_of("dpo", "TrainDpo")


def dpo(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("dpo", "TrainDpo")] = None,
    target: Annotated[str, typer.Option(help="The model to be trained.")],
    pairs: Annotated[
        list[str],
        typer.Option(
            metavar="FILE.jsonl", help="Prompts, each with `chosen` and `rejected`. Repeatable."
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
    """Train a model to prefer the better of two answers, which makes it another model.

    Run again, it goes on where it was. `foretell train pairs` makes pairs.
    """
    import foretell
    from foretell.fetching import resolve
    from foretell.train.dpo import TrainDpo, read, train
    from foretell.train.preferences import check, plan

    config = TrainDpo(**dataclasses.asdict(settings))
    resolve(target)
    files = [Path(name) for name in pairs]
    with quiet(), refusals(f"--out {out}"):
        lm = foretell.load(target, dtype="float32", executor="torch", device=device)
        check(lm, merged)
        reader = read(lm, files, config)
        lm.measure()
        message(plan(reader.parts()[0], config, lm.engine.costs_of(lm.models["target"])))
        made_of = in_use(invocation)
        report = train(lm, reader, out, config, save_every, merged=merged, recipe=made_of)
    before, after = report["before"], report["after"]
    emit(
        f"{out}: learnt from {report['pairs']:,} pairs; of {report['held_out']:,} others the "
        f"better answer became likelier more than the other in {after['preferred']:.1%}, and is "
        f"the likelier one in {after['likelier']:.1%}, before in {before['likelier']:.1%}"
    )
    return 0
