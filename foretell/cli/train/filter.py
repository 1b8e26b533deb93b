"""`foretell train filter`: teaches the filter by which `learn2pd` commits tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json, progress_bar
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.diffusion.filter import TrainFilter as Settings
else:
    Settings = settings_of("diffusion.filter", "TrainFilter")


def filter(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="The file to write the filter to.")
    ],
    prompts: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Prompts whose canvases are filled. Repeatable."),
    ],
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Teach a filter which tokens of a block are final; the model stays as it is."""
    check_writable("--out", out)
    from foretell.bench.prompts import read_prompts
    from foretell.train.diffusion.filter import TrainFilter, train_filter

    config = TrainFilter(**dataclasses.asdict(settings))
    given = [prompt for name in prompts for prompt in read_prompts(name)]
    lm = load_model(models, executors, profile=False)
    with progress_bar() as progress, quiet():
        bar = progress.add_task("replaying", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        report = train_filter(lm, given, out, config, tell)
    if as_json:
        emit_json({"file": str(out), **report})
    else:
        emit(
            f"{out}: of {report['examples']} steps; on held-back ones the area under the curve is "
            f"{report['auc']:.3f}, by chances alone {report['auc_of_chances']:.3f}; use it as "
            f"--method learn2pd:filter={out}"
        )
    return 0
