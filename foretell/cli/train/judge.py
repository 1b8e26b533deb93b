"""`foretell train judge`: trains the judge by which rule `judge` accepts what the target would not
have said.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli._loading import load_model, quiet
from foretell.cli._options import ExecutorOptions, Json, ModelOptions
from foretell.cli._output import emit, emit_json, message, progress_bar, refusals
from foretell.cli._settings import settings_of
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.train.judge import TrainJudge as Settings
else:
    Settings = settings_of("judge", "TrainJudge")


def judge(
    *,
    models: ModelOptions,
    executors: ExecutorOptions,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the run; the finished judge will be OUT/judge.safetensors."),
    ],
    tasks: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Questions with a number as answer, or with `words` to choose from. Repeatable.",
        ),
    ] = None,
    own: Annotated[int, typer.Option(help="Small tasks of its own: sums, stories, lists.")] = 0,
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Train the judge of rule judge; both models stay as they are. Run again, it goes on."""
    from foretell.bench.answer_tasks import own_tasks, read_tasks
    from foretell.train.judge import TrainJudge, check, plan, train

    config = TrainJudge(**dataclasses.asdict(settings))
    given = [task for path in tasks or () for task in read_tasks(path)]
    if own < 0:
        raise BadConfig.field("--own", own, "0 or more")
    given += own_tasks(own, config.seed)
    if not given:
        raise BadConfig("there is nothing to answer: give --tasks, or --own tasks")
    lm = load_model(models, executors, profile=False)
    check(lm)
    with quiet(), refusals(f"--out {out}"):
        lm.measure()
        message(plan(len(given), config, lm.engine.costs_of(lm.models["target"])))
        with progress_bar() as progress:
            bar = progress.add_task("judging", total=None)

            def tell(what: str, done: int, total: int) -> None:
                progress.update(bar, description=what, completed=done, total=total)

            report = train(lm, given, out, config, tell)
    file = out / "judge.safetensors"
    if as_json:
        emit_json({"file": str(file), **report})
    else:
        emit(_summary(file, report))
    return 0


def _summary(file: Path, report: dict[str, Any]) -> str:
    return (
        f"{file}: learnt from {report['labels']:,} mismatches in {report['tasks']:,} tasks, "
        f"{report['unimportant']:.0%} of them unimportant; in tasks held back it ranks an "
        f"unimportant one above an important one in {report['auc']:.1%} of cases (by states one "
        f"token early {report['early_auc']:.1%}, by the target's own chance "
        f"{report['chance_auc']:.1%}); use it with rule=judge,weights={file}"
    )
