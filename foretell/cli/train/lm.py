"""`foretell train lm`: trains a small language model on text, or distils one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, refusals
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.lm import TrainLM as Settings

if not TYPE_CHECKING:
    Settings = settings_of("lm", "TrainLM")


def lm(
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
    teacher: Annotated[
        str | None,
        typer.Option(help="A model to learn from; it must have the same tokenizer."),
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="A model of the same shape to begin with.")
    ] = None,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 300.0,
    compiled: Annotated[
        bool, typer.Option(help="Compile the training step: quicker, but needs a C++ compiler.")
    ] = True,
    settings: Settings,
) -> int:
    """Train a small language model, or distil one. Run again, it goes on where it was."""
    from foretell.train.lm import TrainLM, train

    config = TrainLM(**dataclasses.asdict(settings))
    with quiet(), refusals(f"--out {out}, --corpus {corpus}"):
        report = train(corpus, out, config, text, teacher, save_every, compiled, init=init)
    emit(
        f"{out / 'model'}: {report['parameters']:,} parameters, "
        f"{report['tokens_seen']:,} tokens seen, "
        f"{report['heldout_bits_per_byte']} bits per byte held out"
    )
    return 0
