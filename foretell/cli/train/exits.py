"""`foretell train exits`: finds how sure an exit of a draft model must be, for one target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import emit, emit_json, progress_bar
from foretell.errors import BadConfig


def exits(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    answers: Annotated[
        Path, typer.Option(help="Folder of answers, as `foretell train draft --answers` has them.")
    ],
    length: Annotated[int, typer.Option(help="Tokens of the drafts.")] = 4,
    window: Annotated[int, typer.Option(help="Tokens of the longest text.")] = 640,
    most: Annotated[int, typer.Option(help="Answers to measure on.")] = 64,
    as_json: Json = False,
) -> int:
    """Find the thresholds of a draft model's exits for a target, and keep them in its folder."""
    if models.draft is None or not (Path(models.draft) / "config.json").is_file():
        raise BadConfig("give --draft FOLDER, where the draft model lies: it keeps the thresholds")
    for option, value in (("--length", length), ("--window", window), ("--most", most)):
        if value < 1:
            raise BadConfig.field(option, value, "at least 1")
    files = sorted(answers.rglob("*.safetensors"))
    if not files:
        raise BadConfig(f"--answers {answers}: there are none; `foretell train draft` writes them")
    from foretell.train.exits import calibrate

    lm = load_model(models, executors, profile=False)
    with progress_bar() as progress, quiet():
        bar = progress.add_task("reading answers", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        folder = Path(models.draft)
        found = calibrate(lm, files, folder, length, window, most, models.model, tell)
    if as_json:
        emit_json({"folder": str(folder), **found})
    else:
        told = " ".join(map(str, found["thresholds"]))
        shares = " ".join(f"{share:.2f}" for share in found["shares"])
        emit(
            f"{folder}: thresholds {told} for {models.model}; shares of tokens by exit {shares}; "
            f"{found['found']['greedy']:.2f} tokens a step, by the last exit alone "
            f"{found['last_exit']['greedy']:.2f}"
        )
    return 0
