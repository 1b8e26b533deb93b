"""`foretell generate`: continues a text, and compares a method with plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import foretell
from foretell.api.contexts import Contexts
from foretell.cli._answers import colour_piece, stats_line
from foretell.cli._canvas import show_canvas
from foretell.cli._input import prompt_text
from foretell.cli._loading import load_model, prompt_of
from foretell.cli._options import (
    BackendOptions,
    Budget,
    Guidance,
    Json,
    Kv,
    Method,
    ModelOptions,
    Prompt,
    Reward,
    SamplingOptions,
    Turn,
    check_method,
    check_named,
    read_content,
    with_temperature,
)
from foretell.cli._output import (
    emit,
    emit_json,
    message,
    messages,
    progress_bar,
    refusals,
    show,
    table,
)
from foretell.core.spending import spending_of
from foretell.errors import BadConfig
from foretell.progress import show_working

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.api.outputs import Output, Piece

# A text to continue, a conversation to answer, or either of them after contexts.
Question = str | list[dict[str, str]]
Asked = Question | Contexts
ROUNDS = 3  # of --compare
ECHOED = 400  # characters of a prompt at most that stand before the answer, on a terminal


def generate(
    prompt: Prompt,
    models: ModelOptions,
    backends: BackendOptions,
    sampling: SamplingOptions,
    method: Method = "auto",
    guidance: Guidance = None,
    kv: Kv = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A text that is read apart from others, before the prompt. Repeatable; see ape.",
        ),
    ] = None,
    expand: Annotated[
        list[int] | None,
        typer.Option(
            metavar="NUMBER",
            help="Of a --context, from 1, that stands before the prompt as it is too. Repeatable.",
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="What stands before each --context: an instruction, say.")
    ] = "",
    reward: Reward = None,
    budget: Budget = None,
    as_json: Json = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also run plain decoding, and print the speed of both."),
    ] = False,
    turn: Turn = None,
) -> int:
    """Answer a question, or continue a text. On a terminal, drafted tokens are coloured by who
    proposed them.
    """
    check_named("guidance", guidance)
    check_named("kv", kv)
    check_named("reward", reward)
    spending_of(budget)
    options = {**sampling.arguments(), "guidance": guidance, "reward": reward, "budget": budget}
    options["kv"] = kv
    check_method(method)
    options = with_temperature(method, options)
    if compare and sampling.n > 1:
        raise BadConfig("--compare measures one sample: leave --n out")
    if sampling.n > 1 and not options["temperature"]:
        message("at temperature 0 all answers are alike: --temperature sets another")
    if prefix and not context:
        raise BadConfig("--prefix: it stands before contexts, and there are none; add --context")
    if expand and not context:
        raise BadConfig("--expand: it names contexts, and there are none; add --context")
    texts = [read_content("--context", name) for name in context or ()]
    text = prompt_text(prompt)
    lm = load_model(models, backends)
    question = prompt_of(lm, text, turn)
    prompted: Asked = Contexts(texts, question, prefix, expand or ()) if context else question
    from foretell.engine.cost_profile import number_format

    document_head = {
        "schema": "foretell.generate/1",
        "version": foretell.__version__,
        "model": models.model,
        "dtype": number_format(lm.models["target"]),
        "method": method,
        "prompt": text,
        "chat": not isinstance(question, str),
    }
    if compare:
        compared = _compare_plain(lm, prompted, method, options, visible=not as_json)
        if as_json:
            emit_json(document_head | compared)
        return 0
    if as_json or sampling.n > 1:
        with show_working("generating", messages):
            output = lm.generate(prompted, method, **options)
        if as_json:
            emit_json(document_head | _output_document(output))
        else:
            _print_samples(output, method, sampling.seed, _fills_canvas(lm))
        return 0
    last_piece = _print_stream(prompted, lm.stream(prompted, method, **options), lm)
    if last_piece is not None and last_piece.stats is not None:
        _print_others(last_piece)
        message(stats_line(last_piece.stats, method, fills=_fills_canvas(lm)))
    return 0


def _print_others(piece: Piece) -> None:
    """Prints what else the method found, best first."""
    for number, other_text in enumerate(piece.others, 2):
        score_text = "" if other_text.score is None else f", score {other_text.score:.4g}"
        message(f"--- text {number} of {len(piece.others) + 1}{score_text}")
        emit(other_text.text)


def _fills_canvas(lm: LM) -> bool:
    return "canvas" in lm.models["target"].caps


def _output_document(output: Output) -> dict[str, Any]:
    document = output.to_dict()
    if len(output.samples) > 1:
        document["samples"] = [sample.to_dict() for sample in output.samples]
    return document


def _print_samples(output: Output, method: str, seed: int, fills: bool) -> None:
    count = len(output.samples)
    for index, sample in enumerate(output.samples):
        sample_title = (
            f"seed {seed + index}" if sample.score is None else f"score {sample.score:.4g}"
        )
        message(f"--- sample {index + 1} of {count}, {sample_title}")
        emit(sample.text)
        message(stats_line(sample.stats, method, fills))


def _print_stream(prompt: Asked, pieces: Iterator[Piece], lm: LM | None = None) -> Piece | None:
    """Writes an answer as it comes; on a terminal after the end of its prompt, and coloured, or,
    where `lm` fills canvases, with what stands on its canvas. Returns the last piece.
    """
    console = Console(highlight=False, soft_wrap=True)
    is_terminal = console.is_terminal
    styles: dict[str, str] = {}
    piece = None
    with refusals("standard output"):
        if is_terminal:
            question: Any = prompt.question if isinstance(prompt, Contexts) else prompt
            shown_prompt = Text(
                _prompt_end(
                    question if isinstance(question, str) else f"{question[0]['content']}\n\n"
                ),
                "dim",
            )
            if lm is not None and _fills_canvas(lm):
                return show_canvas(shown_prompt, pieces, lm.decode, console)
            console.print(shown_prompt, end="")
        try:
            with show_working("reading the prompt", messages):
                first_piece = next(pieces, None)
            for piece in chain(() if first_piece is None else (first_piece,), pieces):
                if is_terminal:
                    console.print(colour_piece(piece, styles), end="")
                else:
                    emit(piece.text, end="")
        finally:
            if piece is not None or is_terminal:
                print()
    for source, colour in styles.items():
        messages.print(Text(f"drafted by {source}", colour))
    return piece


def _prompt_end(text: str) -> str:
    """End of a prompt, as much as is worth seeing again."""
    return text if len(text) <= ECHOED else f"… {text[-ECHOED:]}"


def _compare_plain(
    lm: LM, prompt: Asked, method: str, options: dict[str, Any], visible: bool
) -> dict[str, Any]:
    """Plain decoding and `method` in turns; what drafters learn is forgotten before every run."""
    from foretell.api.defaults import baseline_method

    base = baseline_method(lm.models["target"])
    lm.generate(prompt, base, **options)  # the first run of anything is slower
    if visible:
        _print_stream(prompt, lm.stream(prompt, method, **options), lm)
    else:
        lm.generate(prompt, method, **options)
    plain_runs: list[Output] = []
    method_runs: list[Output] = []
    with progress_bar() as progress:
        bar = progress.add_task("measuring", total=ROUNDS * 2)
        for _ in range(ROUNDS):
            for spec, runs in ((base, plain_runs), (method, method_runs)):
                lm.engine.stores.clear()
                runs.append(lm.generate(prompt, spec, **options))
                progress.advance(bar)
    plain = plain_runs[-1]
    output = method_runs[-1]
    plain_speeds = [run.stats.tokens_per_s for run in plain_runs]
    speeds = [run.stats.tokens_per_s for run in method_runs]
    speed_up = _speed_up(plain_speeds, speeds)
    difference = _first_difference(plain.tokens, output.tokens)
    if visible:
        rows = table("", "tokens/s", "speed-up", "MAT", "identical")
        rows.add_row(base, f"{statistics.median(plain_speeds):,.1f}", "1.00", "1.00", "")
        rows.add_row(
            method,
            f"{statistics.median(speeds):,.1f}",
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**speed_up) if speed_up else "too short",
            f"{output.stats.mat:.2f}",
            "yes" if difference is None else f"no, from token {difference + 1} on",
        )
        show(rows)
        message(
            f"{len(output.tokens)} tokens; median and range of {ROUNDS} rounds, "
            "both in turns, nothing learnt beforehand"
        )
    return output.to_dict() | {
        "compare": {
            "rounds": ROUNDS,
            "plain": {
                "method": base,
                "tokens_per_s": plain_speeds,
                "stats": plain.stats.to_dict(),
                "tokens": plain.tokens,
            },
            "method": {"tokens_per_s": speeds, "stats": output.stats.to_dict()},
            "speed_up": speed_up,
            "identical": difference is None,
            "first_difference": difference,
        }
    }


def _speed_up(plain: list[float], method: list[float]) -> dict[str, float] | None:
    """Speed-up by the ratios of rounds; None if the answers are too short to have a speed."""
    ratios = [b / a for a, b in zip(plain, method, strict=True) if a and b]
    if not ratios:
        return None
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def _first_difference(a: list[int], b: list[int]) -> int | None:
    """The first place where two lists of tokens differ; None if they are equal."""
    for position, (token, other_token) in enumerate(zip(a, b, strict=False)):
        if token != other_token:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))
