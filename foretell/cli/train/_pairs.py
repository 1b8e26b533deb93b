"""What the trainers that learn from pairs of answers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import message, refusals
from foretell.cli.train._recipe import in_use

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.train.preferences.preferences import Reader, TrainPairs

Target = Annotated[str, typer.Option(help="The model to be trained.")]
Out = Annotated[Path, typer.Option(help="Folder of the run; results are OUT/lora and OUT/model.")]
Merged = Annotated[
    str, typer.Option(help="Number format of OUT/model, the new model; empty: no OUT/model.")
]
Device = Annotated[str, typer.Option(help="Where it is trained: cpu, cuda, cuda:1.")]
SaveEvery = Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")]


def train_on_pairs(
    invocation: typer.Context, config: TrainPairs, read: Callable[[LM], Reader]
) -> dict[str, Any]:
    """Runs the command with these settings, on what `read` finds; returns the report."""
    import foretell
    from foretell.loading.fetch import resolve
    from foretell.train.preferences.preferences import check, plan, train

    given = invocation.params
    out = Path(given["out"])
    resolve(given["target"])
    with quiet(), refusals(f"--out {out}"):
        lm = foretell.load(
            given["target"], dtype="float32", executor="torch", device=given["device"]
        )
        check(lm, given["merged"])
        reader = read(lm)
        learnt, _ = reader.parts()
        lm.measure()
        message(plan(learnt, config, lm.engine.costs_of(lm.models["target"])))
        return train(
            lm,
            reader,
            out,
            config,
            given["save_every"],
            merged=given["merged"],
            recipe=in_use(invocation),
        )
