"""`foretell train gad`: trains a corrector of sentences and a drafter that fills in its blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, refusals, show, table
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.gad import TrainGad as Settings

if not TYPE_CHECKING:
    Settings = settings_of("gad", "TrainGad")


def gad(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder of the run: OUT/model, OUT/drafter, OUT/report.json.")
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="stdlib, a folder, a .jsonl or a text file, whose sentences are spoiled and put "
            "right. Repeatable.",
            show_default="stdlib",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda.", show_default="cuda where there is one")
    ] = "",
    settings: Settings,
) -> int:
    """Train an encoder-decoder that corrects sentences, and its block drafter; measure both."""
    from foretell.train.gad import TrainGad, train

    config = TrainGad(**dataclasses.asdict(settings))
    with quiet(), refusals(f"--out {out}"):
        report = train(out, text or ["stdlib"], config, device)
    rows = table("", "tokens a step", "as plain", "right")
    for method, found in report["methods"].items():
        numbers = (found["same_as_plain"], found["right"])
        shares = [f"{number:.1%}" for number in numbers]
        rows.add_row(method, f"{found['tokens_per_step']:.2f}", *shares)
    show(rows)
    emit(
        f"{out}: {report['parameters']:,} parameters each, measured on "
        f"{report['sentences']['measured']} sentences that were held back; "
        f"foretell generate --model {out / 'model'} --draft {out / 'drafter'} --method gad TEXT"
    )
    return 0
