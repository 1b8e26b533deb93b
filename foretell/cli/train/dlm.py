"""`foretell train dlm`: trains a model that fills canvases."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, refusals
from foretell.cli._settings import settings_of
from foretell.cli.train._asking import first_alone
from foretell.cli.train._pairs import Device
from foretell.cli.train._recipe import in_use, recipe_option
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.train.diffusion.dlm import TrainDLM as Settings
else:
    Settings = settings_of("diffusion.dlm", "TrainDLM")


def dlm(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("diffusion.dlm", "TrainDLM")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the finished model will be OUT/model.")
    ],
    init: Annotated[
        str | None,
        typer.Option(help="The model to begin with; without it a new one learns lists."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="Folder of answers to learn from, of `foretell train draft --answers`."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Plain text to learn from: `stdlib`, a folder, a .jsonl or a text file. "
            "Repeatable.",
        ),
    ] = None,
    text_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of plain text in all.")
    ] = 4_000_000,
    lists: Annotated[
        int,
        typer.Option(min=0, help="Lists and puzzles to learn from, in the tokens of --init."),
    ] = 0,
    own: Annotated[
        int, typer.Option(min=0, help="Prompts that the model answers first, to learn from that.")
    ] = 0,
    device: Device = "cpu",
    workers: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="Processes that make batches; some for a GPU, which waits for them."
        ),
    ] = 0,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Train a model that fills canvases. Run again, it goes on where it was."""
    import foretell
    from foretell.train.answers import known, write_texts
    from foretell.train.diffusion.dlm import TrainDLM, train
    from foretell.train.processes import Processes

    config = TrainDLM(**dataclasses.asdict(settings))
    files = [] if answers is None else known(answers)
    if answers is not None and not files:
        raise BadConfig(f"--answers {answers}: has no answers; `foretell train draft` writes them")
    if text and init is None:
        raise BadConfig("--text: a new model learns lists; give --init, the model to begin with")
    with quiet(), refusals(f"--out {out}"):
        lm = None
        if init is not None:
            lm = foretell.load(init, dtype="float32", executor="torch", device=device)
            if text:
                files += write_texts(lm.encode, text, out / "text", text_tokens, config.seed)
        report = train(
            out,
            config,
            lm,
            files,
            own,
            save_every,
            recipe=in_use(invocation),
            telling=partial(first_alone, Processes()),
            device=device,
            lists=lists,
            workers=workers,
        )
    right = ", ".join(f"{share:.3f} at {rate}" for rate, share in report["right"].items())
    emit(
        f"{out / 'model'}: {report['parameters']:,} parameters, {report['examples_seen']:,} "
        f"examples seen; of masked tokens held back, right: {right}"
    )
    return 0
