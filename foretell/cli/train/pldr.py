"""`foretell train pldr`: trains a small PLDR-LLM and freezes its metric."""

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
    from foretell.train.pldr import TrainPLDR as Settings
else:
    Settings = settings_of("pldr", "TrainPLDR")


def pldr(
    *,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run; the models will be OUT/model and OUT/frozen."),
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
    """Train a small PLDR-LLM and freeze its metric. Run again, it goes on where it was."""
    from foretell.train.pldr import TrainPLDR, train

    config = TrainPLDR(**dataclasses.asdict(settings))
    with quiet(), refusals(f"--out {out}, --corpus {corpus}"):
        report = train(corpus, out, config, text, save_every)
    if as_json:
        emit_json({"folder": str(out), **report})
        return 0
    bits = report["heldout_bits_per_byte"]["all"]
    emit(
        f"{out / 'model'}: {report['parameters']:,} parameters, "
        f"{report['tokens_seen']:,} tokens seen, {bits} bits per byte held out"
    )
    if "metric" in report:
        losses = report["metric"]["loss"]
        emit(
            f"nats per token of second halves: {losses['whole']:.4f} under a text's own metric, "
            f"{losses['cached']:.4f} under its first half's, {losses['frozen']:.4f} frozen; "
            f"metrics of texts differ by {report['metric']['between_texts']['rmse']:.3g} "
            "of their size"
        )
    return 0
