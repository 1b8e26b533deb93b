"""`foretell train blockffn`: trains a small model whose feed-forward layers are blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._options import Json
from foretell.cli._output import emit, emit_json, refusals
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.blockffn import TrainBlockFFN as Settings
else:
    Settings = settings_of("blockffn", "TrainBlockFFN")


def blockffn(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the finished model will be OUT/model.")
    ],
    corpus: Annotated[
        Path, typer.Option(help="Folder for the tokenizer and the tokens of the texts.")
    ],
    text: Annotated[
        list[str],
        typer.Option(
            metavar="SOURCE",
            help="stdlib, a folder, a .jsonl or a text file; SOURCE*3 repeats it. Repeatable.",
        ),
    ],
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Train a small model of sparse blocks. Run again, it goes on where it was."""
    from foretell.train.blockffn import TrainBlockFFN, train

    config = TrainBlockFFN(**dataclasses.asdict(settings))
    with quiet(), refusals(f"--out {out}, --corpus {corpus}"):
        report = train(corpus, out, config, text, save_every)
    if as_json:
        emit_json({"folder": str(out), **report})
        return 0
    held = report["heldout"]
    shares = ", ".join(f"{size}: {share:.1%}" for size, share in held["sparsity"].items())
    emit(
        f"{out / 'model'}: {report['parameters']:,} parameters, "
        f"{report['tokens_seen']:,} tokens seen, perplexity {held['perplexity']} held out"
    )
    emit(f"blocks left alone by so many successive tokens: {shares}")
    return 0
