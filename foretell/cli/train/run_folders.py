"""Trainers with a folder for the run, in which one that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foretell.cli._output import message, show, table
from foretell.cli.train._trainer import (
    Count,
    Device,
    Folder,
    PromptFiles,
    Recipe,
    Report,
    SaveEvery,
    SomeTexts,
    Texts,
    TextTokens,
    first_alone,
    load_trainable,
    open_run,
    progress,
    read_sources,
    trainer,
)
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.train.blockffn import TrainBlockFFN
    from foretell.train.caches.compressor import TrainCompressor
    from foretell.train.caches.kv_heads import TrainKVHeads
    from foretell.train.diffusion.dlm import TrainDLM
    from foretell.train.gad import TrainGad
    from foretell.train.lm import TrainLM
    from foretell.train.pldr import TrainPLDR
    from foretell.train.preferences.dpo import TrainDpo
    from foretell.train.preferences.grpo import TrainGrpo
    from foretell.train.preferences.mango import TrainMango
    from foretell.train.preferences.preferences import Reader, TrainPairs


@dataclass(frozen=True)
class CorpusRun:
    """A run on texts as a language model reads them."""

    out: Annotated[Path, Option(help="Folder of the run; the finished model will be OUT/model.")]
    corpus: Annotated[Path, Option(help="Folder for the tokenizer and the tokens of the texts.")]
    text: Annotated[
        list[str],
        Option(
            metavar="SOURCE",
            help="stdlib, a folder, a .jsonl or a text file; SOURCE*3 repeats it. Repeatable.",
        ),
    ]

    def open_folders(self) -> AbstractContextManager[None]:
        return open_run(out=self.out, corpus=self.corpus)


@dataclass(frozen=True)
class PairRun:
    """A run that learns from pairs of answers which one is better."""

    target: Annotated[str, Option(help="The model to be trained.")]
    out: Annotated[Path, Option(help="Folder of the run; results are OUT/lora and OUT/model.")]
    merged: Annotated[
        str, Option(help="Number format of OUT/model, the new model; empty: no OUT/model.")
    ] = "bfloat16"
    device: Device = "cpu"
    save_every: SaveEvery = 300.0

    def train(self, config: TrainPairs, recipe: Any, read_pairs: Callable[[LM], Reader]) -> Any:
        """Trains the target on the pairs that were read for it; returns the report."""
        from foretell.train.preferences.preferences import check_pairs, plan_pairs, train_pairs

        merged, every = self.merged, self.save_every
        with open_run(self.target, out=self.out):
            lm = load_trainable(self.target, self.device)
            check_pairs(lm, merged)
            reader = read_pairs(lm)
            learnt, _ = reader.parts()
            lm.measure()
            message(plan_pairs(learnt, config, lm.engine.costs_of(lm.models["target"])))
            return train_pairs(lm, reader, self.out, config, every, merged=merged, recipe=recipe)


@trainer("blockffn.TrainBlockFFN")
def blockffn(config: TrainBlockFFN, run: CorpusRun, save_every: SaveEvery = 300.0) -> Report:
    """Train a small model of sparse blocks. Run again, it goes on where it was."""
    from foretell.train.blockffn import train_blockffn

    with run.open_folders():
        report = train_blockffn(run.corpus, run.out, config, run.text, save_every)
    heldout = report["heldout"]
    shares = ", ".join(f"{size}: {share:.1%}" for size, share in heldout["sparsity"].items())
    return Report(
        {"folder": str(run.out), **report},
        f"{run.out / 'model'}: {report['parameters']:,} parameters, {report['tokens_seen']:,} "
        f"tokens seen, perplexity {heldout['perplexity']} held out\n"
        f"blocks left alone by so many successive tokens: {shares}",
    )


@trainer("caches.compressor.TrainCompressor")
def compressor(
    config: TrainCompressor, target: str, out: Folder, text: Texts, save_every: SaveEvery = 300.0
) -> Report:
    """Train an encoder of long contexts. Run again, it goes on where it was.

    --target: The model that is to read the rows.
    --out: Folder of the run; the encoder is OUT/compressor, a tuned target OUT/model.
    """
    from foretell.train.caches.compressor import train_compressor

    with open_run(target, out=out):
        lm = load_trainable(target)
        report = train_compressor(lm, read_sources(text), out, config, save_every)
    folder = out / "compressor"
    bits = report["bits_per_byte"]
    model = f"--model {out / 'model'} " if config.whole else ""
    return Report(
        {"folder": str(folder), **report},
        f"{folder}: {report['rows']} rows in place of {config.length} tokens; bits a byte of what "
        f"follows: full context {bits['full']:.3f}, none {bits['none']:.3f}, as many last tokens "
        f"{bits['raw']:.3f}, rows {bits['compressed']:.3f}, another text's {bits['another']:.3f}; "
        f"use it as {model}--kv {config.kind}:folder={folder}",
    )


@trainer("diffusion.dlm.TrainDLM")
def dlm(
    config: TrainDLM,
    recipe: Recipe,
    out: Path,
    init: str | None = None,
    answers: Path | None = None,
    text: SomeTexts = None,
    text_tokens: TextTokens = 4_000_000,
    lists: Count = 0,
    own: Count = 0,
    device: Device = "cpu",
    workers: Annotated[int, Option(min=0, max=64)] = 0,
    save_every: SaveEvery = 300.0,
) -> str:
    """Train a model that fills canvases. Run again, it goes on where it was.

    --out: Folder of the run; the finished model will be OUT/model.
    --init: The model to begin with; without it a new one learns lists.
    --answers: Folder of answers to learn from, of `foretell train draft --answers`.
    --text: Plain text to learn from: `stdlib`, a folder, a .jsonl or a text file. Repeatable.
    --lists: Lists and puzzles to learn from, in the tokens of --init.
    --own: Prompts that the model answers first, to learn from that.
    --workers: Processes that make batches; some for a GPU, which waits for them.
    """
    from foretell.train.answers import answer_files, write_texts
    from foretell.train.diffusion.dlm import train_dlm
    from foretell.train.processes import Processes

    files = [] if answers is None else answer_files(answers)
    if answers is not None and not files:
        raise BadConfig(f"--answers {answers}: has no answers; `foretell train draft` writes them")
    if text and init is None:
        raise BadConfig("--text: a new model learns lists; give --init, the model to begin with")
    with open_run(*[init] if init is not None else [], out=out):
        lm = None if init is None else load_trainable(init, device)
        if lm is not None and text:
            files += write_texts(lm.encode, text, out / "text", text_tokens, config.seed)
        report = train_dlm(
            out,
            config,
            lm,
            files,
            own,
            save_every,
            recipe=recipe,
            device=device,
            lists=lists,
            workers=workers,
            telling=partial(first_alone, Processes()),
        )
    right_shares = ", ".join(f"{share:.3f} at {rate}" for rate, share in report["right"].items())
    return (
        f"{out / 'model'}: {report['parameters']:,} parameters, {report['examples_seen']:,} "
        f"examples seen; of masked tokens held back, right: {right_shares}"
    )


@trainer("preferences.dpo.TrainDpo")
def dpo(config: TrainDpo, recipe: Recipe, run: PairRun, pairs: PromptFiles) -> str:
    """Train a model to prefer the better of two answers, which makes it another model.

    Run again, it goes on where it was. `foretell train pairs` makes pairs.

    --pairs: Prompts, each with `chosen` and `rejected`. Repeatable.
    """
    from foretell.train.preferences.dpo import read_dpo

    files = [Path(name) for name in pairs]
    report = run.train(config, recipe, lambda lm: read_dpo(lm, files, config))
    untrained, trained = report["before"], report["after"]
    return (
        f"{run.out}: learnt from {report['pairs']:,} pairs; of {report['held_out']:,} others the "
        f"better answer became likelier more than the other in {trained['preferred']:.1%}, and is "
        f"the likelier one in {trained['likelier']:.1%}, before in {untrained['likelier']:.1%}"
    )


@trainer("gad.TrainGad")
def gad(
    config: TrainGad,
    out: Path,
    text: Annotated[list[str] | None, Option(metavar="SOURCE", show_default="stdlib")] = None,
    device: Annotated[str, Option(show_default="cuda where there is one")] = "",
) -> str:
    """Train an encoder-decoder that corrects sentences, and its block drafter; measure both.

    --out: Folder of the run: OUT/model, OUT/drafter, OUT/report.json.
    --text: stdlib, a folder, a .jsonl or a text file, whose sentences are spoiled and put right.
        Repeatable.
    --device: cpu or cuda.
    """
    from foretell.train.gad import train_gad

    with open_run(out=out):
        report = train_gad(out, text or ["stdlib"], config, device)
    rows = table("", "tokens a step", "as plain", "right")
    for method, numbers in report["methods"].items():
        shares = [f"{numbers[name]:.1%}" for name in ("same_as_plain", "right")]
        rows.add_row(method, f"{numbers['tokens_per_step']:.2f}", *shares)
    show(rows)
    return (
        f"{out}: {report['parameters']:,} parameters each, measured on "
        f"{report['sentences']['measured']} sentences that were held back; "
        f"foretell generate --model {out / 'model'} --draft {out / 'drafter'} --method gad TEXT"
    )


@trainer("preferences.grpo.TrainGrpo")
def grpo(
    config: TrainGrpo,
    recipe: Recipe,
    target: str,
    prompts: PromptFiles,
    out: Path,
    dtype: str = "int8",
    backend: str = "auto",
    draft: str | None = None,
    merged: str = "bfloat16",
    device: Device = "cpu",
    save_every: SaveEvery = 300.0,
) -> str:
    """Train a model by a reward, as LoRA weights (GRPO). Run again, it goes on where it was.

    --target: The model that learns.
    --prompts: Prompts, with `references` for rewards that compare with some. Repeatable.
    --out: Folder of the run; results are OUT/lora and OUT/model.
    --dtype: Number format in which answers are drawn.
    --backend: Who computes that.
    --draft: A smaller model, for drafters that have one.
    --merged: Number format of OUT/model, which answers are drawn from.
    """
    from foretell.train.preferences.grpo import plan_grpo, train_grpo
    from foretell.train.preferences.rollouts import read_questions

    drafting = {} if draft is None else {"draft": draft}
    options = {"dtype": dtype, "backend": backend, "device": device, **drafting}
    with open_run(target, *drafting.values(), out=out):
        lm = load_trainable(target, device)
        lengths = config.prompt_tokens, config.answer_tokens
        questions = read_questions(lm, prompts, config.reward, *lengths)
        message(plan_grpo(questions, config))
        with progress() as tell:
            report = train_grpo(
                lm, questions, out, config, options, merged, save_every, recipe=recipe, tell=tell
            )
    untrained, trained = report["before"], report["after"]
    return (
        f"{out}: {report['parameters']:,} parameters, {report['rounds']:,} rounds; answers to "
        f"{report['held_back']:,} prompts held back had a reward of {untrained['reward']:.4f} in "
        f"{untrained['tokens']:.0f} tokens before, and {trained['reward']:.4f} in "
        f"{trained['tokens']:.0f} after; foretell generate --model {out / 'model'}"
    )


@trainer("caches.kv_heads.TrainKVHeads")
def kv_heads(
    config: TrainKVHeads, target: str, out: Folder, text: Texts, save_every: SaveEvery = 300.0
) -> Report:
    """Make of a model one that caches fewer key heads. Run again, it goes on where it was.

    --target: The model whose heads are merged.
    --out: Folder of the run; the model is OUT/model.
    --text: Texts to learn from: stdlib, a folder, a .jsonl or a text file. Repeatable.
    """
    from foretell.train.caches.kv_heads import train_kv_heads

    with open_run(target, out=out):
        lm = load_trainable(target)
        with progress("reading") as tell:
            report = train_kv_heads(lm, read_sources(text), out, config, save_every, tell=tell)
    heads, perplexity = report["heads"], report["perplexity"]
    tuned = f" and {perplexity['tuned']:.2f} tuned" if "tuned" in perplexity else ""
    return Report(
        {"folder": str(out), **report},
        f"{out / 'model'}: {heads['after']} key heads in place of {heads['before']}; perplexity of "
        f"texts held out {perplexity['before']:.2f} before, {perplexity['merged']:.2f} "
        f"merged{tuned}",
    )


@trainer("lm.TrainLM")
def lm(
    config: TrainLM,
    run: CorpusRun,
    teacher: str | None = None,
    init: str | None = None,
    save_every: float = 300.0,
    compiled: bool = True,
) -> str:
    """Train a small language model, or distil one. Run again, it goes on where it was.

    --teacher: A model to learn from; it must have the same tokenizer.
    --init: A model of the same shape to begin with.
    --save-every: Seconds between checkpoints.
    --compiled: Compile the training step: quicker, but needs a C++ compiler.
    """
    from foretell.train.lm import train_lm

    with run.open_folders():
        report = train_lm(
            run.corpus, run.out, config, run.text, teacher, save_every, compiled, init=init
        )
    return (
        f"{run.out / 'model'}: {report['parameters']:,} parameters, {report['tokens_seen']:,} "
        f"tokens seen, {report['heldout_bits_per_byte']} bits per byte held out"
    )


@trainer("preferences.mango.TrainMango")
def mango(
    config: TrainMango,
    recipe: Recipe,
    run: PairRun,
    code: Annotated[list[str], Option(metavar="SOURCE")],
) -> str:
    """Train a model to write code with comments sooner than without, which makes it another model.

    Run again, it goes on where it was. Of Python files it learns the functions with docstrings.

    --code: stdlib, a folder or a file of Python, or a .jsonl of prompts, each with code as its
        `answer`. Repeatable.
    """
    from foretell.train.preferences.mango import read_mango

    report = run.train(config, recipe, lambda lm: read_mango(lm, code, config))
    untrained, trained = report["before"], report["after"]
    return (
        f"{run.out}: learnt from {report['pairs']:,} answers; a token of {report['held_out']:,} "
        f"others surprises it by {trained['commented']:.3f} nats with comments (before "
        f"{untrained['commented']:.3f}) and by {trained['uncommented']:.3f} without (before "
        f"{untrained['uncommented']:.3f})"
    )


@trainer("pldr.TrainPLDR")
def pldr(config: TrainPLDR, run: CorpusRun, save_every: SaveEvery = 300.0) -> Report:
    """Train a small PLDR-LLM and freeze its metric. Run again, it goes on where it was.

    --out: Folder of the run; the models will be OUT/model and OUT/frozen.
    """
    from foretell.train.pldr import train_pldr

    with run.open_folders():
        report = train_pldr(run.corpus, run.out, config, run.text, save_every)
    sentence = (
        f"{run.out / 'model'}: {report['parameters']:,} parameters, {report['tokens_seen']:,} "
        f"tokens seen, {report['heldout_bits_per_byte']['all']} bits per byte held out"
    )
    if "metric" in report:
        losses = report["metric"]["loss"]
        sentence += (
            f"\nnats per token of second halves: {losses['whole']:.4f} under a text's own metric, "
            f"{losses['cached']:.4f} under its first half's, {losses['frozen']:.4f} frozen; "
            f"metrics of texts differ by {report['metric']['between_texts']['rmse']:.3g} "
            "of their size"
        )
    return Report({"folder": str(run.out), **report}, sentence)
