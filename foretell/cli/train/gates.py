"""`foretell train gates`: finds the key heads that need all of a text, for `kv=duo-attention`."""

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
    from foretell.train.caches.gates import TrainGates as Settings
else:
    Settings = settings_of("caches.gates", "TrainGates")


def gates(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="The file to write the gates to.")
    ],
    text: TextOption,
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Learn which key heads need all of a text, on planted passkeys; the model stays as it is."""
    check_writable("--out", out)
    from foretell.train.caches.gates import TrainGates, train_gates

    config = TrainGates(**dataclasses.asdict(settings))
    lm = load_model(models, executors, profile=False)
    with told("training") as tell:
        report = train_gates(lm, texts_of(text), out, config, tell)
    if as_json:
        emit_json({"file": str(out), **report})
    else:
        emit(
            f"{out}: gates of mean {report['mean']:.2f} after {report['steps']} steps, states "
            f"differ by {report['difference']:.3f}; use them as --kv duo-attention:gates={out}"
        )
    return 0
