"""`foretell train grpo`: trains a model by a reward, as LoRA weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, message, progress_bar, refusals
from foretell.cli._settings import settings_of
from foretell.cli.train._recipe import in_use, recipe_option

if TYPE_CHECKING:
    from foretell.train.preferences.grpo import TrainGrpo as Settings

if not TYPE_CHECKING:
    Settings = settings_of("preferences.grpo", "TrainGrpo")


def grpo(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("preferences.grpo", "TrainGrpo")] = None,
    target: Annotated[str, typer.Option(help="The model that learns.")],
    prompts: Annotated[
        list[str],
        typer.Option(
            metavar="FILE.jsonl",
            help="Prompts, with `references` for rewards that compare with some. Repeatable.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; results are OUT/lora and OUT/model.")
    ],
    dtype: Annotated[str, typer.Option(help="Number format in which answers are drawn.")] = "int8",
    executor: Annotated[str, typer.Option(help="Who computes that.")] = "auto",
    draft: Annotated[
        str | None, typer.Option(help="A smaller model, for drafters that have one.")
    ] = None,
    merged: Annotated[
        str, typer.Option(help="Number format of OUT/model, which answers are drawn from.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where it is trained: cpu or cuda.")] = "cpu",
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Train a model by a reward, as LoRA weights (GRPO). Run again, it goes on where it was."""
    import foretell
    from foretell.loading.fetch import resolve
    from foretell.train.preferences.grpo import TrainGrpo, plan, train
    from foretell.train.preferences.rollouts import read_questions

    config = TrainGrpo(**dataclasses.asdict(settings))
    resolve(target)
    options = {"dtype": dtype, "executor": executor, "device": device}
    if draft is not None:
        resolve(draft)
        options["draft"] = draft
    with quiet(), refusals(f"--out {out}"):
        lm = foretell.load(target, dtype="float32", executor="torch", device=device)
        questions = read_questions(
            lm, prompts, config.reward, config.prompt_tokens, config.answer_tokens
        )
        message(plan(questions, config))
        with progress_bar() as progress:
            bar = progress.add_task("", total=None, visible=False)

            def tell(what: str, done: int, total: int | None) -> None:
                shown = done != total
                progress.update(bar, description=what, completed=done, total=total, visible=shown)

            report = train(
                lm,
                questions,
                out,
                config,
                options,
                merged,
                save_every,
                recipe=in_use(invocation),
                tell=tell,
            )
    before, after = report["before"], report["after"]
    emit(
        f"{out}: {report['parameters']:,} parameters, {report['rounds']:,} rounds; answers to "
        f"{report['held_back']:,} prompts held back had a reward of {before['reward']:.4f} in "
        f"{before['tokens']:.0f} tokens before, and {after['reward']:.4f} in {after['tokens']:.0f} "
        f"after; foretell generate --model {out / 'model'}"
    )
    return 0
