"""Trainers that learn from a target's own answers, which it writes first: heads, draft models, and
targets that are tuned to say several tokens at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foretell.cli._output import message
from foretell.cli.train._trainer import (
    ProcessDevice,
    Recipe,
    SaveEvery,
    SomeTexts,
    TextTokens,
    first_alone,
    load_trainable,
    open_run,
    read_files,
    trainer,
)
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.train.draft import TrainDraft
    from foretell.train.heads.head import TrainHead
    from foretell.train.heads.k_forcing import TrainKForcing
    from foretell.train.heads.lud import TrainLud
    from foretell.train.heads.medusa_2 import TrainMedusa2
    from foretell.train.processes import Processes

NO_HITS = "there were none; give more prompts"


@dataclass(frozen=True)
class AnswerRun:
    """A run that learns from a target's own answers, which it has the target write first."""

    target: Annotated[str, Option(help="The model to be drafted for.")]
    out: Annotated[Path, Option(help="Folder of the run.")]
    answers: Annotated[Path, Option(help="Folder for the target's answers.")]
    prompts: Annotated[
        list[str] | None, Option(metavar="FILE.jsonl", help="Prompts to be answered. Repeatable.")
    ] = None
    own: Annotated[int, Option(min=0, help="Questions that the target asks itself.")] = 0
    answer_tokens: Annotated[int, Option(min=1, help="The longest answer.")] = 256
    dtype: Annotated[str, Option(help="Number format in which the target answers.")] = "int8"
    save_every: SaveEvery = 300.0

    def read_questions(self) -> list[Any]:
        """The prompts; none are needed where there are answers already. Raises BadConfig."""
        from foretell.train.answers import answer_files

        questions = read_files(self.prompts or ())
        if not questions and self.own < 1 and not answer_files(self.answers):
            raise BadConfig(
                f"there is nothing to answer, and {self.answers} holds no answers: give "
                "--prompts, or --own questions"
            )
        return questions

    @contextmanager
    def answer(
        self,
        questions: list[Any],
        seed: int,
        check: Callable[[LM], object],
        processes: Processes | None = None,
        **folders: Path | None,
    ) -> Iterator[tuple[LM, list[Path]]]:
        """Loads the target and writes the answers that are not there yet; yields both.

        `check`: raises where the target cannot be trained, before anything takes hours. `folders`:
        others of the run, by their options.
        """
        import foretell
        from foretell.train.answers import write_all
        from foretell.train.processes import Processes

        with open_run(self.target, out=self.out, answers=self.answers, **folders):
            lm = foretell.load(self.target, dtype=self.dtype)
            check(lm)
            with first_alone(processes or Processes()) as tell:
                files = write_all(
                    lm, questions, self.own, self.answers, self.answer_tokens, seed, tell
                )
            loaded = [lm]
            del lm  # the block may free it
            yield loaded.pop(), files

    def tune(
        self, name: str, train: Callable[..., Any], config: Any, merged: str, recipe: Any
    ) -> Any:
        """Tunes the target by the trainer `train` of this name; returns the report."""
        from foretell.drafters.heads.networks.folder import target_shape
        from foretell.train.heads.tuned import check_tuning

        check_tuning(merged)

        def check(lm: LM) -> None:
            target_shape(lm.models["target"], f"train {name}")

        with self.answer(self.read_questions(), config.seed, check) as (lm, files):
            lm = load_trainable(self.target)
            every = self.save_every
            return train(lm, files, self.out, config, every, merged=merged, recipe=recipe)


def _tuning_summary(out: Path, report: dict[str, Any]) -> str:
    perplexity = report["perplexity"]
    return (
        f"{out}: {report['parameters']:,} parameters, {report['tokens_seen']:,} tokens seen; "
        f"perplexity of answers held back {perplexity['before']} before and "
        f"{perplexity['after']} after"
    )


@trainer("draft.TrainDraft")
def draft(
    config: TrainDraft,
    recipe: Recipe,
    run: AnswerRun,
    text: SomeTexts = None,
    text_tokens: TextTokens = 4_000_000,
    init: str | None = None,
    reference: str | None = None,
    device: ProcessDevice = "",
) -> str:
    """Distil a draft model on a target's own answers. Run again, it goes on where it was.

    --out: Folder of the run; the finished model will be OUT/model.
    --text: Plain text to learn from before the answers: `stdlib`, a folder, a .jsonl or a text
        file. Repeatable.
    --init: A model of the same shape to begin with.
    --reference: A trained draft model: learn from the answers where most is to be gained (AdaSPEC).
    """
    import foretell
    from foretell.loading.load import location_of
    from foretell.train.answers import write_texts
    from foretell.train.draft import starting_models, train_draft
    from foretell.train.exits import calibrate_exits
    from foretell.train.processes import Processes

    questions = run.read_questions()
    processes = Processes(device)
    processes.check(config.batch, config.micro)
    init, reference = (name and str(location_of(name)) for name in (init, reference))
    model = run.out / "model"

    def check(lm: LM) -> None:
        starting_models(lm, config, init, reference)

    with run.answer(questions, config.seed, check, processes) as (lm, files):
        train = partial(train_draft, lm, save_every=run.save_every, processes=processes)
        if text:
            with first_alone(processes) as tell:
                tell("plain texts", 0, None)
                folder = run.answers / "text"
                pieces = write_texts(lm.encode, text, folder, text_tokens, config.seed)
            plain = dataclasses.replace(config, tokens=text_tokens, objective="kl")
            train(pieces, run.out / "text", plain, init=init)
            init = str(run.out / "text" / "model")
        report = train(files, run.out, config, init=init, recipe=recipe, reference=reference)
        if config.exits and processes.is_first:
            models = foretell.load(run.target, dtype=run.dtype, draft=str(model))
            calibrate_exits(models, files, model, window=config.window, name=run.target)
    if not processes.is_first:
        return ""
    shares = report["held_back"]
    return (
        f"{model}: {report['parameters']:,} parameters, {report['tokens_seen']:,} tokens seen; of "
        f"the tokens of answers held back {shares['greedy']:.3f} are the target's best, "
        f"{shares['drawn']:.3f} accepted when drawn"
    )


@trainer("heads.head.TrainHead")
def head(
    config: TrainHead,
    recipe: Recipe,
    run: AnswerRun,
    states: Path | None = None,
    states_dtype: str = "bfloat16",
    init: Path | None = None,
    reference: Path | None = None,
    device: ProcessDevice = "",
) -> str:
    """Train a head that drafts from a target's hidden states. Run again, it goes on where it was.

    Answers and states are made once, and serve every head of this target.

    --out: Folder of the run; the finished head will be OUT/head.
    --states: Folder for the target's hidden states, which most kinds read.
    --states-dtype: Number format in which its states are computed.
    --init: Folder of a head of the same kind to begin with.
    --reference: Folder of a trained head: learn where most is to be gained (AdaSPEC).
    """
    import foretell
    from foretell.drafters.heads.networks.folder import target_shape
    from foretell.loading.load import check_options
    from foretell.ops.fingerprint import fingerprint
    from foretell.train.heads import anchored
    from foretell.train.heads.head import begin_head, plan_head, taps_of, train_head
    from foretell.train.processes import Processes
    from foretell.train.states import write_states

    questions = run.read_questions()
    through_target = anchored.runs_through_target(config.name)
    anchored.check_inputs(config, states, reference, states_dtype)
    processes = Processes(device)
    processes.check(config.batch, config.micro)
    # Gradients pass through torch's own layers alone.
    backend, place = ("torch", device or None) if through_target else ("auto", None)
    check_options(run.target, states_dtype, backend, place)
    count, length = len(questions) + run.own, run.answer_tokens

    def check(lm: LM) -> None:
        model = lm.models["target"]
        shape = target_shape(model, "train head")
        if through_target:
            depth = anchored.begin_anchored(model, config, init).deepest
        else:
            begin_head(model, config, init, reference)
            taps = taps_of(config.name, shape, config.options)
        if not processes.is_first:
            return
        lm.measure()
        costs = lm.engine.costs_of(model)
        if through_target:
            message(anchored.plan_anchored(count, length, config, depth, costs))
        else:
            message(plan_head(count, length, shape, taps, config, costs))

    with run.answer(questions, config.seed, check, processes, states=states) as (lm, files):
        if through_target or states_dtype != run.dtype:
            lm = foretell.load(run.target, dtype=states_dtype, backend=backend, device=place)
        if states is None or through_target:
            train = partial(anchored.train_anchored, lm, files)
        else:
            model = lm.models["target"]
            taps = taps_of(config.name, target_shape(model, "train head"), config.options)
            with first_alone(processes) as tell:
                rows = write_states(model, files, states, taps, fingerprint(model), tell)
            train = partial(
                train_head, lm, files, rows, taps, processes=processes, reference=reference
            )
        report = train(run.out, config, run.save_every, init=init, recipe=recipe)
    if not processes.is_first:
        return ""
    hits = " ".join(f"{share:.3f}" for share in report["hits"])
    return (
        f"{run.out / 'head'}: {config.kind}, {report['parameters']:,} parameters, "
        f"{report['tokens_seen']:,} tokens seen; of greedy answers held back it foretells the next "
        f"tokens, each if all before it: {hits or NO_HITS}"
    )


@trainer("heads.k_forcing.TrainKForcing")
def k_forcing(
    config: TrainKForcing, recipe: Recipe, run: AnswerRun, merged: str = "bfloat16"
) -> str:
    """Tune a model to turn noise into its next k tokens, which becomes another model.

    Run again, it goes on where it was. Answers are those of `foretell train head`.

    --target: The model to be tuned.
    --out: Folder of the run; results are OUT/model and OUT/head.
    --merged: Number format of OUT/model, the tuned target.
    """
    from foretell.train.heads.k_forcing import train_k_forcing

    report = run.tune("k-forcing", train_k_forcing, config, merged, recipe)
    same_noise, other_noise = (
        " ".join(f"{share:.3f}" for share in report["drawn"][name]) for name in ("shared", "other")
    )
    return (
        f"{_tuning_summary(run.out, report)}; the rows say what the target draws, each if all "
        f"before it, with its noise {same_noise}, with other noise {other_noise}"
    )


@trainer("heads.lud.TrainLud")
def lud(config: TrainLud, recipe: Recipe, run: AnswerRun, merged: str = "bfloat16") -> str:
    """Tune a model to say lexical units at once, which becomes another model.

    Run again, it goes on where it was. Answers are those of `foretell train head`.

    --target: The model to be tuned.
    --out: Folder of the run; results are OUT/model and OUT/head.
    --merged: Number format of OUT/model, the tuned target.
    """
    from foretell.train.heads.lud import train_lud

    report = run.tune("lud", train_lud, config, merged, recipe)
    hits, misses = (
        " ".join(f"{share:.3f}" for share in report[name]) for name in ("hits", "wrong")
    )
    return (
        f"{_tuning_summary(run.out, report)}; of their units the rows say {hits}, and of what they "
        f"are sure of is wrong {misses}"
    )


@trainer("heads.medusa_2.TrainMedusa2")
def medusa_2(
    config: TrainMedusa2,
    recipe: Recipe,
    run: AnswerRun,
    init: Path | None = None,
    merged: str = "bfloat16",
    device: ProcessDevice = "",
) -> str:
    """Train Medusa heads together with a LoRA on their target, which becomes another model.

    Run again, it goes on where it was. Answers are those of `foretell train head`.

    --target: The model to be tuned and drafted for.
    --out: Folder of the run; results are OUT/lora, OUT/head and OUT/model.
    --init: Folder of heads to begin with, of `foretell train head --kind medusa`.
    --merged: Number format of OUT/model, the tuned target; empty: no OUT/model.
    """
    from foretell.drafters.heads.networks.folder import target_shape
    from foretell.train.heads.head import read_head
    from foretell.train.heads.medusa_2 import KIND, check_format, train_medusa_2
    from foretell.train.processes import Processes

    check_format(merged)
    questions = run.read_questions()
    processes = Processes(device)
    processes.check(config.batch, config.micro)

    def check(lm: LM) -> None:
        target_shape(lm.models["target"], "train medusa-2")
        if init is not None:
            read_head(init, lm.models["target"], KIND)

    with run.answer(questions, config.seed, check, processes) as (lm, files):
        lm = load_trainable(run.target, processes.device)
        report = train_medusa_2(
            lm,
            files,
            run.out,
            config,
            run.save_every,
            init=init,
            merged=merged,
            processes=processes,
            recipe=recipe,
        )
    if not processes.is_first:
        return ""
    hits = " ".join(f"{share:.3f}" for share in report["hits"])
    return (
        f"{_tuning_summary(run.out, report)}; of greedy ones the heads foretell the next tokens, "
        f"each if all before it: {hits or NO_HITS}"
    )
