"""Trainers of what methods read, in a file beside the model; the model stays as it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from foretell.cli._output import message
from foretell.cli.train._trainer import (
    Folder,
    Models,
    PromptFiles,
    Prompts,
    Report,
    RowFile,
    SomeTexts,
    TensorFile,
    Texts,
    open_run,
    progress,
    read_files,
    read_sources,
    trainer,
)
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.train.acceptance import Text, TrainHead
    from foretell.train.amateur import TrainAmateur
    from foretell.train.attribute import TrainAttribute
    from foretell.train.caches.channels import FindChannels
    from foretell.train.caches.gates import TrainGates
    from foretell.train.diffusion.filter import TrainFilter
    from foretell.train.judge import TrainJudge
    from foretell.train.preferences.infty import Cut
    from foretell.train.preferences.pairs import Search


@trainer("acceptance.TrainHead")
def acceptance_head(
    config: TrainHead,
    models: Models,
    out: TensorFile,
    prompts: Annotated[Path | None, Option(metavar="FILE.jsonl")] = None,
    text: SomeTexts = None,
) -> Report:
    """Train the head by which specdec-pp ends its drafts; both models stay as they are.

    --prompts: Prompts; the head learns from the answers.
    --text: Texts to learn from: stdlib, a folder, a .jsonl or a text file. Repeatable.
    """
    from foretell.train.acceptance import answer_prompts, cut_documents, train_acceptance_head

    if (prompts is None) == (not text):
        raise BadConfig("give either --prompts FILE.jsonl or --text SOURCE to learn from")
    questions = read_files([prompts]) if prompts is not None else []
    lm = models.load()
    with progress("reading") as tell:
        pieces: Iterable[Text] = cut_documents(lm, read_sources(text or []), config)
        if prompts is not None:
            pieces = answer_prompts(lm, questions, config, tell)
        report = train_acceptance_head(lm, pieces, out, config, tell)
    return Report(
        {"file": str(out), **report},
        f"{out}: learnt from {report['examples']:,} drafted tokens; of {report['held_out']:,} "
        f"others {report['accepted']:.0%} are accepted, and the head ranks an accepted one above a "
        f"rejected one in {report['auc']:.1%} of cases (the draft model's confidence: "
        f"{report['confidence_auc']:.1%}); use it with --method specdec-pp:head={out}",
    )


@trainer("amateur.TrainAmateur")
def amateur(config: TrainAmateur, models: Models, answers: Prompts, out: Folder) -> Report:
    """Teach a model false answers as LoRA weights, the amateur of lol; the model stays as it is.

    --answers: Prompts, each with the false text that is its `answer`.
    --out: Where the LoRA weights are put.
    """
    from foretell.train.amateur import train_amateur

    with open_run(out=out):
        report = models.train("reading", train_amateur, answers, out, config)
    folder = out if "/" in str(out) else f"./{out}"  # a name alone would be a model's
    return Report(
        {"folder": str(out), **report},
        f"{out}: learnt from {report['answers']:,} answers; {report['held_out']:,} others "
        f"surprise it by {report['after']:.2f} nats a token, and the model by "
        f"{report['before']:.2f}; use it with --guidance lol:amateur={folder}",
    )


@trainer("attribute.TrainAttribute")
def attribute(config: TrainAttribute, models: Models, out: TensorFile, prompts: Prompts) -> Report:
    """Train the classifier of conditional-beam; the model stays as it is.

    --prompts: Prompts; it learns from the answers.
    """
    from foretell.train.attribute import train_attribute

    questions = read_files([prompts])
    report = models.train("answering", train_attribute, questions, out, config)
    return Report(
        {"file": str(out), **report},
        f"{out}: learnt from {report['beginnings']:,} beginnings of answers to "
        f"{report['prompts']:,} prompts, {report['good']:.0%} of them of good ones; of prompts "
        f"held back it ranks a good one above another in {report['auc']:.1%} of cases; use it with "
        f"--method conditional-beam:attribute={out}",
    )


@trainer("caches.channels.FindChannels")
def channels(config: FindChannels, models: Models, out: TensorFile, text: Texts) -> Report:
    """Find which channels of a model's keys matter; the model stays as it is."""
    from foretell.train.caches.channels import find_channels

    report = models.train("reading", find_channels, read_sources(text), out, config)
    return Report(
        {"file": str(out), **report},
        f"{out}: of {report['tokens']} tokens; a quarter of the channels has "
        f"{report['quarter']:.0%} of the products; use it as "
        f"--kv double-sparsity:calibration={out}",
    )


@trainer()
def exits(
    models: Models, answers: Path, length: int = 4, window: int = 640, most: int = 64
) -> Report:
    """Find the thresholds of a draft model's exits for a target, and keep them in its folder.

    --answers: Folder of answers, as `foretell train draft --answers` has them.
    --length: Tokens of the drafts.
    --window: Tokens of the longest text.
    --most: Answers to measure on.
    """
    if models.draft is None or not (Path(models.draft) / "config.json").is_file():
        raise BadConfig("give --draft FOLDER, where the draft model lies: it keeps the thresholds")
    for option, value in (("--length", length), ("--window", window), ("--most", most)):
        if value < 1:
            raise BadConfig.field(option, value, "at least 1")
    files = sorted(answers.rglob("*.safetensors"))
    if not files:
        raise BadConfig(f"--answers {answers}: there are none; `foretell train draft` writes them")
    from foretell.train.exits import calibrate_exits

    folder = Path(models.draft)
    inputs = (files, folder, length, window, most, models.model)
    report = models.train("reading answers", calibrate_exits, *inputs)
    thresholds = " ".join(map(str, report["thresholds"]))
    shares = " ".join(f"{share:.2f}" for share in report["shares"])
    return Report(
        {"folder": str(folder), **report},
        f"{folder}: thresholds {thresholds} for {models.model}; shares of tokens by exit {shares}; "
        f"{report['found']['greedy']:.2f} tokens a step, by the last exit alone "
        f"{report['last_exit']['greedy']:.2f}",
    )


@trainer("diffusion.filter.TrainFilter")
def filter(
    config: TrainFilter,
    models: Models,
    out: TensorFile,
    prompts: Annotated[list[str], Option(metavar="FILE")],
) -> Report:
    """Teach a filter which tokens of a block are final; the model stays as it is.

    --prompts: Prompts whose canvases are filled. Repeatable.
    """
    from foretell.train.diffusion.filter import train_filter

    report = models.train("replaying", train_filter, read_files(prompts), out, config)
    return Report(
        {"file": str(out), **report},
        f"{out}: of {report['examples']} steps; on held-back ones the area under the curve is "
        f"{report['auc']:.3f}, by chances alone {report['auc_of_chances']:.3f}; use it as "
        f"--method learn2pd:filter={out}",
    )


@trainer("caches.gates.TrainGates")
def gates(config: TrainGates, models: Models, out: TensorFile, text: Texts) -> Report:
    """Learn which key heads need all of a text, on planted passkeys; the model stays as it is."""
    from foretell.train.caches.gates import train_gates

    report = models.train("training", train_gates, read_sources(text), out, config)
    return Report(
        {"file": str(out), **report},
        f"{out}: gates of mean {report['mean']:.2f} after {report['steps']} steps, states "
        f"differ by {report['difference']:.3f}; use them as --kv duo-attention:gates={out}",
    )


@trainer("preferences.infty.Cut")
def infty(config: Cut, models: Models, texts: Prompts, out: RowFile) -> Report:
    """Cut long thoughts into rounds, for a model that is to learn infty-think.

    The model writes the summaries between them.

    --texts: Prompts, each with an `answer` that thinks.
    """
    from foretell.train.preferences.infty import write_rounds

    read_files([texts])  # what is wrong with them is told before the model is loaded
    lm = models.load(profile=True)
    with progress("cutting") as tell:
        report = write_rounds(lm, texts, out, config, tell)
    left_out = report["without_thoughts"] + report["unfinished"]
    return Report(
        {"file": str(out), **report},
        f"{out}: {report['rows']:,} rounds of {report['texts']:,} texts, {left_out:,} left out",
    )


@trainer("judge.TrainJudge")
def judge(
    config: TrainJudge,
    models: Models,
    out: Path,
    tasks: Annotated[list[Path] | None, Option(metavar="FILE.jsonl")] = None,
    own: int = 0,
) -> Report:
    """Train the judge of rule judge; both models stay as they are. Run again, it goes on.

    --out: Folder of the run; the finished judge will be OUT/judge.safetensors.
    --tasks: Questions with a number as answer, or with `words` to choose from. Repeatable.
    --own: Small tasks of its own: sums, stories, lists.
    """
    from foretell.bench.answer_tasks import make_tasks, read_tasks
    from foretell.train.judge import check_models, plan_judge, train_judge

    questions = [task for path in tasks or () for task in read_tasks(path)]
    if own < 0:
        raise BadConfig.field("--own", own, "0 or more")
    questions += make_tasks(own, config.seed)
    if not questions:
        raise BadConfig("there is nothing to answer: give --tasks, or --own tasks")
    lm = models.load()
    check_models(lm)
    with open_run(out=out):
        lm.measure()
        message(plan_judge(len(questions), config, lm.engine.costs_of(lm.models["target"])))
        with progress("judging") as tell:
            report = train_judge(lm, questions, out, config, tell)
    file = out / "judge.safetensors"
    return Report(
        {"file": str(file), **report},
        f"{file}: learnt from {report['labels']:,} mismatches in {report['tasks']:,} tasks, "
        f"{report['unimportant']:.0%} of them unimportant; in tasks held back it ranks an "
        f"unimportant one above an important one in {report['auc']:.1%} of cases (by states one "
        f"token early {report['early_auc']:.1%}, by the target's own chance "
        f"{report['chance_auc']:.1%}); use it with rule=judge,weights={file}",
    )


@trainer("preferences.pairs.Search")
def pairs(config: Search, models: Models, prompts: PromptFiles, out: RowFile) -> Report:
    """Make pairs of answers for dpo: the model's own, and how it refined it. Run again, it goes on.

    Of each prompt the file has a line, which is without answers where no refinement passed.
    """
    from foretell.train.preferences.pairs import rows_so_far, write_pairs

    questions = read_files(prompts)
    rows_so_far(out, questions)
    lm = models.load(profile=True)
    message(
        f"{len(questions):,} prompts, each with an answer of at most {config.max_new_tokens:,} "
        "tokens, its judgements and its refinements"
    )
    with progress("searching") as tell:
        rows = write_pairs(lm, questions, out, config, tell)
    count = sum(row["chosen"] is not None for row in rows)
    errors = [row["error"] for row in rows if "error" in row]
    return Report(
        {"file": str(out), "prompts": len(rows), "pairs": count, "failed": len(errors)},
        f"{out}: {count:,} pairs of {len(rows):,} prompts; foretell train dpo --pairs {out}",
        f"{len(errors)} prompts failed, the first with: {errors[0]}" if errors else "",
    )
