"""`foretell train k-forcing`: tunes a model by a LoRA to turn noise into its next k tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, refusals
from foretell.cli._settings import settings_of
from foretell.cli.train._asking import asked, first_alone
from foretell.cli.train._recipe import in_use, recipe_option

if TYPE_CHECKING:
    from foretell.train.heads.k_forcing import TrainKForcing as Settings

if not TYPE_CHECKING:
    Settings = settings_of("heads.k_forcing", "TrainKForcing")


def k_forcing(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("heads.k_forcing", "TrainKForcing")] = None,
    target: Annotated[str, typer.Option(help="The model to be tuned.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; results are OUT/model and OUT/head.")
    ],
    answers: Annotated[Path, typer.Option(help="Folder for the target's answers.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts to be answered. Repeatable."),
    ] = None,
    own: Annotated[int, typer.Option(min=0, help="Questions that the target asks itself.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    dtype: Annotated[str, typer.Option(help="Number format in which the target answers.")] = "int8",
    merged: Annotated[
        str, typer.Option(help="Number format of OUT/model, the tuned target.")
    ] = "bfloat16",
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Tune a model to turn noise into its next k tokens, which becomes another model.

    Run again, it goes on where it was. Answers are those of `foretell train head`.
    """
    import foretell
    from foretell.drafters.heads.networks.folder import target_shape
    from foretell.loading.fetch import resolve
    from foretell.train.answers import write_all
    from foretell.train.heads.k_forcing import TrainKForcing, train
    from foretell.train.heads.tuned import check
    from foretell.train.processes import Processes

    config = TrainKForcing(**dataclasses.asdict(settings))
    check(merged)
    questions = asked(prompts, own, answers)
    resolve(target)
    with quiet(), refusals(f"--out {out}, --answers {answers}"):
        lm = foretell.load(target, dtype=dtype)
        target_shape(lm.models["target"], "train k-forcing")
        with first_alone(Processes()) as tell:
            files = write_all(lm, questions, own, answers, answer_tokens, config.seed, tell)
        lm = foretell.load(target, dtype="float32", executor="torch")
        recipe_used = in_use(invocation)
        report = train(lm, files, out, config, save_every, merged=merged, recipe=recipe_used)
    shared, other = (
        " ".join(f"{share:.3f}" for share in report["drawn"][name]) for name in ("shared", "other")
    )
    before, after = report["perplexity"]["before"], report["perplexity"]["after"]
    emit(
        f"{out}: {report['parameters']:,} parameters, {report['tokens_seen']:,} tokens seen; "
        f"perplexity of answers held back {before} before and {after} after; the rows say what the "
        f"target draws, each if all before it, with its noise {shared}, with other noise {other}"
    )
    return 0
