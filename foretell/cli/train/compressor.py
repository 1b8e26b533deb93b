"""`foretell train compressor`: an encoder that makes a few rows of a context."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._options import Json
from foretell.cli._output import emit, emit_json, refusals
from foretell.cli._settings import settings_of
from foretell.cli.train._texts import TextOption, texts_of

if TYPE_CHECKING:
    from foretell.train.caches.compressor import TrainCompressor as Settings
else:
    Settings = settings_of("caches.compressor", "TrainCompressor")


def compressor(
    *,
    target: Annotated[str, typer.Option(help="The model that is to read the rows.")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the run; the encoder is OUT/compressor, a tuned target OUT/model.",
        ),
    ],
    text: TextOption,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Train an encoder of long contexts. Run again, it goes on where it was."""
    import foretell
    from foretell.train.caches.compressor import TrainCompressor, train

    config = TrainCompressor(**dataclasses.asdict(settings))
    with quiet(), refusals(f"--out {out}"):
        lm = foretell.load(target, dtype="float32", executor="torch")
        report = train(lm, texts_of(text), out, config, save_every)
    folder = out / "compressor"
    if as_json:
        emit_json({"folder": str(folder), **report})
        return 0
    told = report["bits_per_byte"]
    model = f"--model {out / 'model'} " if config.whole else ""
    emit(
        f"{folder}: {report['rows']} rows in place of {config.length} tokens; bits a byte of what "
        f"follows: full context {told['full']:.3f}, none {told['none']:.3f}, as many last tokens "
        f"{told['raw']:.3f}, rows {told['compressed']:.3f}, another text's "
        f"{told['another']:.3f}; use it as "
        f"{model}--kv {config.kind}:folder={folder}"
    )
    return 0
