"""`foretell train channels`: finds the key channels by which `kv=double-sparsity` finds rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json, progress_bar
from foretell.cli.train._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.channels import FindChannels as Settings
else:
    Settings = settings_of("channels", "FindChannels")


def channels(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="The file to write the table to.")
    ],
    text: Annotated[
        list[str],
        typer.Option(
            metavar="SOURCE",
            help="Texts to read: stdlib, a folder, a .jsonl or a text file. Repeatable.",
        ),
    ],
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Find which channels of a model's keys matter; the model stays as it is."""
    check_writable("--out", out)
    from foretell.train.channels import FindChannels, find_channels
    from foretell.train.corpus import documents

    config = FindChannels(**dataclasses.asdict(settings))

    def texts() -> Iterator[str]:
        for source in text:
            for _, document in documents(source):
                yield document.encode("utf-8", "replace").decode()

    lm = load_model(models, executors, profile=False)
    with progress_bar() as progress, quiet():
        bar = progress.add_task("reading", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        report = find_channels(lm, texts(), out, config, tell)
    if as_json:
        emit_json({"file": str(out), **report})
    else:
        emit(
            f"{out}: of {report['tokens']} tokens; a quarter of the channels has "
            f"{report['quarter']:.0%} of the products; use it as "
            f"--kv double-sparsity:calibration={out}"
        )
    return 0
