"""`foretell train head`: trains a head that drafts from a target's hidden states."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._output import emit, message, refusals
from foretell.cli._settings import settings_of
from foretell.cli.train._asking import asked, first_alone
from foretell.cli.train._recipe import in_use, recipe_option
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.train.heads.head import TrainHead as Settings

if not TYPE_CHECKING:
    Settings = settings_of("heads.head", "TrainHead")


def head(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("heads.head", "TrainHead")] = None,
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
    own: Annotated[int, typer.Option(min=0, help="Questions that the target asks itself.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
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
    device: Annotated[
        str,
        typer.Option(help="Where the head is trained; cpu, but under `accelerate launch` GPUs."),
    ] = "",
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Train a head that drafts from a target's hidden states. Run again, it goes on where it was.

    Answers and states are made once, and serve every head of this target.
    """
    import foretell
    from foretell.drafters.heads.networks.folder import target_shape
    from foretell.loading.fetch import resolve
    from foretell.loading.load import check_options
    from foretell.models.decoder.packed import WHOLE_NUMBERS
    from foretell.ops.fingerprint import fingerprint
    from foretell.train.answers import write_all
    from foretell.train.heads import anchored
    from foretell.train.heads.head import TrainHead, beginning, plan, taps_of, train
    from foretell.train.processes import Processes
    from foretell.train.states import write_states

    config = TrainHead(**dataclasses.asdict(settings))
    questions = asked(prompts, own, answers)
    through = anchored.runs_through_target(config.name)
    if states is None and not through:
        raise BadConfig(f"{config.kind} learns from hidden states: give a folder, --states FOLDER")
    if reference is not None and through:
        raise BadConfig(f"{config.kind} takes no --reference: its rows learn from all tokens")
    if through and states_dtype in WHOLE_NUMBERS:
        what = "its rows learn through the target's layers; give bfloat16 or float32"
        raise BadConfig(f"{config.kind} takes no --states-dtype {states_dtype}: {what}")
    processes = Processes(device)
    processes.check(config.batch, config.micro)
    resolve(target)
    # Gradients pass through torch's own layers alone.
    executor, where = ("torch", device or None) if through else ("auto", None)
    check_options(target, states_dtype, executor, where)
    with quiet(), refusals(f"--out {out}, --answers {answers}, --states {states}"):
        lm = foretell.load(target, dtype=dtype)
        model = lm.models["target"]
        shape = target_shape(model, "train head")
        # Whatever is wrong is told before anything takes hours.
        if through:
            deepest = anchored.beginning(model, config, init).deepest
        else:
            beginning(model, config, init, reference)
        taps = () if through else taps_of(config.name, shape, config.options)
        if processes.first:
            lm.measure()
            costs = lm.engine.costs_of(model)
            count = len(questions) + own
            if through:
                message(anchored.plan(count, answer_tokens, config, deepest, costs))
            else:
                message(plan(count, answer_tokens, shape, taps, config, costs))
        with first_alone(processes) as tell:
            files = write_all(lm, questions, own, answers, answer_tokens, config.seed, tell)
            if through or states_dtype != dtype:
                lm = foretell.load(target, dtype=states_dtype, executor=executor, device=where)
                model = lm.models["target"]
            if states is not None and not through:
                told = fingerprint(model)
                beside = write_states(model, files, states, taps, told, tell)
        if through:
            kept = in_use(invocation)
            report = anchored.train(lm, files, out, config, save_every, init=init, recipe=kept)
        else:
            report = train(
                lm,
                files,
                beside,
                taps,
                out,
                config,
                save_every,
                processes=processes,
                recipe=in_use(invocation),
                init=init,
                reference=reference,
            )
    if not processes.first:
        return 0
    hits = " ".join(f"{share:.3f}" for share in report["hits"])
    emit(
        f"{out / 'head'}: {config.kind}, {report['parameters']:,} parameters, "
        f"{report['tokens_seen']:,} tokens seen; of greedy answers held back it foretells the next "
        f"tokens, each if all before it: {hits or 'there were none; give more prompts'}"
    )
    return 0
