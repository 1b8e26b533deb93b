"""`foretell train medusa-2`: trains Medusa heads together with a LoRA on their target."""

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
    from foretell.train.heads.medusa_2 import TrainMedusa2 as Settings

if not TYPE_CHECKING:
    Settings = settings_of("heads.medusa_2", "TrainMedusa2")


def medusa_2(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("heads.medusa_2", "TrainMedusa2")] = None,
    target: Annotated[str, typer.Option(help="The model to be tuned and drafted for.")],
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run; results are OUT/lora, OUT/head and OUT/model."),
    ],
    answers: Annotated[Path, typer.Option(help="Folder for the target's answers.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts to be answered. Repeatable."),
    ] = None,
    own: Annotated[int, typer.Option(min=0, help="Questions that the target asks itself.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    dtype: Annotated[str, typer.Option(help="Number format in which the target answers.")] = "int8",
    init: Annotated[
        Path | None,
        typer.Option(help="Folder of heads to begin with, of `foretell train head --kind medusa`."),
    ] = None,
    merged: Annotated[
        str, typer.Option(help="Number format of OUT/model, the tuned target; empty: no OUT/model.")
    ] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="Where it is trained; cpu, but under `accelerate launch` GPUs.")
    ] = "",
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Train Medusa heads together with a LoRA on their target, which becomes another model.

    Run again, it goes on where it was. Answers are those of `foretell train head`.
    """
    import foretell
    from foretell.drafters.heads.networks.folder import target_shape
    from foretell.loading.fetch import resolve
    from foretell.train.answers import write_all
    from foretell.train.heads.head import head_before
    from foretell.train.heads.medusa_2 import KIND, TrainMedusa2, check, train
    from foretell.train.processes import Processes

    config = TrainMedusa2(**dataclasses.asdict(settings))
    check(merged)
    questions = asked(prompts, own, answers)
    processes = Processes(device)
    processes.check(config.batch, config.micro)
    resolve(target)
    with quiet(), refusals(f"--out {out}, --answers {answers}"):
        lm = foretell.load(target, dtype=dtype)
        target_shape(lm.models["target"], "train medusa-2")
        if init is not None:
            head_before(init, lm.models["target"], KIND)
        with first_alone(processes) as tell:
            files = write_all(lm, questions, own, answers, answer_tokens, config.seed, tell)
        report = train(
            foretell.load(target, dtype="float32", executor="torch", device=processes.device),
            files,
            out,
            config,
            save_every,
            init=init,
            merged=merged,
            processes=processes,
            recipe=in_use(invocation),
        )
    if not processes.first:
        return 0
    hits = " ".join(f"{share:.3f}" for share in report["hits"])
    before, after = report["perplexity"]["before"], report["perplexity"]["after"]
    emit(
        f"{out}: {report['parameters']:,} parameters, {report['tokens_seen']:,} tokens seen; "
        f"perplexity of answers held back {before} before and {after} after; of greedy ones the "
        f"heads foretell the next tokens, each if all before it: "
        f"{hits or 'there were none; give more prompts'}"
    )
    return 0
