"""`foretell train draft`: distils a small draft model for a target on the target's own answers."""

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
    from foretell.train.draft import TrainDraft as Settings

if not TYPE_CHECKING:
    Settings = settings_of("draft", "TrainDraft")


def draft(
    invocation: typer.Context,
    *,
    recipe: Annotated[str | None, recipe_option("draft", "TrainDraft")] = None,
    target: Annotated[str, typer.Option(help="The model to be drafted for.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the finished model will be OUT/model.")
    ],
    answers: Annotated[Path, typer.Option(help="Folder for the target's answers.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts to be answered. Repeatable."),
    ] = None,
    own: Annotated[int, typer.Option(min=0, help="Questions that the target asks itself.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Plain text to learn from before the answers: `stdlib`, a folder, a .jsonl or a "
            "text file. Repeatable.",
        ),
    ] = None,
    text_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of plain text in all.")
    ] = 4_000_000,
    dtype: Annotated[str, typer.Option(help="Number format of the target.")] = "int8",
    init: Annotated[
        str | None, typer.Option(help="A model of the same shape to begin with.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="A trained draft model: learn from the answers where most is to be gained "
            "(AdaSPEC)."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Where the model is trained; cpu, but under `accelerate launch` GPUs."),
    ] = "",
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
) -> int:
    """Distil a draft model on a target's own answers. Run again, it goes on where it was."""
    import foretell
    from foretell.loading.fetch import resolve
    from foretell.loading.load import place_of
    from foretell.train.answers import write_all, write_texts
    from foretell.train.draft import TrainDraft, beginning, train
    from foretell.train.exits import calibrate
    from foretell.train.processes import Processes

    config = TrainDraft(**dataclasses.asdict(settings))
    questions = asked(prompts, own, answers)
    processes = Processes(device)
    processes.check(config.batch, config.micro)
    init, reference = (name and str(place_of(name)) for name in (init, reference))
    resolve(target)
    with quiet(), refusals(f"--out {out}, --answers {answers}"):
        lm = foretell.load(target, dtype=dtype)
        beginning(lm, config, init, reference)  # whatever is wrong is told before the answers
        with first_alone(processes) as tell:
            files = write_all(lm, questions, own, answers, answer_tokens, config.seed, tell)
            if text:
                tell("plain texts", 0, None)
                place = answers / "text"
                plain = write_texts(lm.encode, text, place, text_tokens, config.seed)
        if text:
            first = dataclasses.replace(config, tokens=text_tokens, objective="kl")
            train(lm, plain, out / "text", first, save_every, init=init, processes=processes)
            init = str(out / "text" / "model")
        report = train(
            lm,
            files,
            out,
            config,
            save_every,
            init=init,
            processes=processes,
            recipe=in_use(invocation),
            reference=reference,
        )
        if config.exits and processes.first:
            model = out / "model"
            both = foretell.load(target, dtype=dtype, draft=str(model))
            calibrate(both, files, model, window=config.window, name=target)
    if not processes.first:
        return 0
    emit(
        f"{out / 'model'}: {report['parameters']:,} parameters, "
        f"{report['tokens_seen']:,} tokens seen; of the tokens of answers held back "
        f"{report['held_back']['greedy']:.3f} are the target's best, "
        f"{report['held_back']['drawn']:.3f} accepted when drawn"
    )
    return 0
