"""`foretell train attribute`: trains the classifier by which `conditional-beam` ranks texts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json, progress_bar
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.attribute import TrainAttribute as Settings
else:
    Settings = settings_of("attribute", "TrainAttribute")


def attribute(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="The file to write it to.")],
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Prompts; it learns from the answers.")
    ],
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Train the classifier of conditional-beam; the model stays as it is."""
    check_writable("--out", out)
    from foretell.bench.prompts import read_prompts
    from foretell.train.attribute import TrainAttribute, train

    config = TrainAttribute(**dataclasses.asdict(settings))
    asked = read_prompts(prompts)
    lm = load_model(models, executors, profile=False)
    with progress_bar() as progress, quiet():
        bar = progress.add_task("answering", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        report = train(lm, asked, out, config, tell)
    if as_json:
        emit_json({"file": str(out), **report})
    else:
        emit(_summary(out, report))
    return 0


def _summary(out: Path, report: dict[str, Any]) -> str:
    return (
        f"{out}: learnt from {report['beginnings']:,} beginnings of answers to "
        f"{report['prompts']:,} prompts, {report['good']:.0%} of them of good ones; of prompts "
        f"held back it ranks a good one above another in {report['auc']:.1%} of cases; use it with "
        f"--method conditional-beam:attribute={out}"
    )
