"""`foretell train head`: trains a head that drafts from a target's hidden states."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, message, progress_bar, refusals
from foretell.cli.train._settings import settings_of
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.train.head import TrainHead as Settings

if not TYPE_CHECKING:
    Settings = settings_of("head", "TrainHead")


def head(
    *,
    target: Annotated[str, typer.Option(help="The model to be drafted for.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the finished head will be OUT/head.")
    ],
    answers: Annotated[Path, typer.Option(help="Folder for the target's answers.")],
    states: Annotated[
        Path | None,
        typer.Option(help="Folder for the target's hidden states, which most kinds read."),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts to be answered. Repeatable."),
    ] = None,
    own: Annotated[int, typer.Option(help="Questions that the target asks itself.")] = 0,
    answer_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 256,
    dtype: Annotated[str, typer.Option(help="Number format in which the target answers.")] = "int8",
    states_dtype: Annotated[
        str, typer.Option(help="Number format in which its states are computed.")
    ] = "bfloat16",
    init: Annotated[
        Path | None, typer.Option(help="Folder of a head of the same kind to begin with.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="Folder of a trained head: learn where most is to be gained (AdaSPEC)."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the head is trained.")] = "cpu",
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Train a head that drafts from a target's hidden states. Run again, it goes on where it was.

    Answers and states are made once, and serve every head of this target.
    """
    import foretell
    from foretell.fetching import resolve
    from foretell.heads.folder import build, fingerprint, target_shape
    from foretell.measure.prompts import read_prompts
    from foretell.train import anchored
    from foretell.train.answers import write_all
    from foretell.train.head import TrainHead, head_before, plan, taps_of, train
    from foretell.train.states import write_states

    config = TrainHead(**dataclasses.asdict(settings))
    asked = [prompt for name in prompts or () for prompt in read_prompts(name)]
    if not asked and own < 1:
        raise BadConfig("there is nothing to answer: give --prompts, or --own questions")
    if answer_tokens < 1:
        raise BadConfig.field("--answer-tokens", answer_tokens, "at least 1")
    through = anchored.runs_through_target(config.kind)
    if states is None and not through:
        raise BadConfig(f"{config.kind} learns from hidden states: give a folder, --states FOLDER")
    if reference is not None and through:
        raise BadConfig(f"{config.kind} takes no --reference: its rows learn from all tokens")
    resolve(target)
    with quiet(), refusals(f"--out {out}, --answers {answers}, --states {states}"):
        lm = foretell.load(target, dtype=dtype)
        model = lm.models["target"]
        shape = target_shape(model, "train head")
        # Whatever is wrong is told before anything takes hours.
        made = anchored.build_rows(config, shape) if through else build(config.kind, shape)
        for before in (init, reference):
            if before is not None:
                head_before(before, model, config.kind)
        lm.measure()
        costs = lm.engine.costs_of(model)
        count = len(asked) + own
        if through:
            message(anchored.plan(count, answer_tokens, config, made.deepest, costs))
        else:
            taps = taps_of(config.kind, shape)
            message(plan(count, answer_tokens, shape, taps, config, costs))
        with progress_bar() as progress:
            bar = progress.add_task("", total=None)

            def tell(what: str, done: int, total: int) -> None:
                progress.update(bar, description=what, completed=done, total=total)

            files = write_all(lm, asked, own, answers, answer_tokens, config.seed, tell)
            if through or states_dtype != dtype:
                executor = "torch" if through else "auto"
                where = device if through else None
                lm = foretell.load(target, dtype=states_dtype, executor=executor, device=where)
                model = lm.models["target"]
            if not through:
                assert states is not None
                told = fingerprint(model)
                beside = write_states(model, files, states, taps, told, tell)
        if through:
            report = anchored.train(lm, files, out, config, save_every, init=init)
        else:
            report = train(
                lm,
                files,
                beside,
                taps,
                out,
                config,
                save_every,
                device=device,
                init=init,
                reference=reference,
            )
    hits = " ".join(f"{share:.3f}" for share in report["hits"])
    emit(
        f"{out / 'head'}: {config.kind}, {report['parameters']:,} parameters, "
        f"{report['tokens_seen']:,} tokens seen; of greedy answers held back it foretells the next "
        f"tokens, each if all before it: {hits}"
    )
    return 0
