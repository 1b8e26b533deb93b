"""`foretell train channels`: finds the key channels by which `kv=double-sparsity` finds rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import load_model
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json
from foretell.cli._settings import settings_of
from foretell.cli.train._texts import TextOption, texts_of, told

if TYPE_CHECKING:
    from foretell.train.caches.channels import FindChannels as Settings
else:
    Settings = settings_of("caches.channels", "FindChannels")


def channels(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="The file to write the table to.")
    ],
    text: TextOption,
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Find which channels of a model's keys matter; the model stays as it is."""
    check_writable("--out", out)
    from foretell.train.caches.channels import FindChannels, find_channels

    config = FindChannels(**dataclasses.asdict(settings))
    lm = load_model(models, executors, profile=False)
    with told("reading") as tell:
        report = find_channels(lm, texts_of(text), out, config, tell)
    if as_json:
        emit_json({"file": str(out), **report})
    else:
        emit(
            f"{out}: of {report['tokens']} tokens; a quarter of the channels has "
            f"{report['quarter']:.0%} of the products; use it as "
            f"--kv double-sparsity:calibration={out}"
        )
    return 0
