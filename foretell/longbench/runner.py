"""Runs long-context tasks: each context under every cache policy, into a document.

A unit is one context under one policy in one mode. What an interrupted run has measured stays.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench import document as documents
from foretell.bench.turns import one_line_reason
from foretell.errors import BadConfig, ForetellError
from foretell.longbench import texts
from foretell.longbench.asking import Questions, Scored
from foretell.longbench.report import summarize_cells
from foretell.longbench.settings import PERPLEXITY, Contender, Settings
from foretell.longbench.tasks import MORE, QUESTIONS, TASKS, Item, make_item

if TYPE_CHECKING:
    from foretell.api.lm import LM

SCHEMA = "foretell.measure.longbench/1"
SAVED = 10  # seconds between two savings at least
PARTS = 4  # of the scored half of a text, whose perplexities are told apart
HEAD = "\n\n"  # between a context and a question
Tell = Callable[[str, int, int], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Unit:
    task: str
    mode: str
    length: int
    number: int  # of the context
    contender: Contender

    @property
    def key(self) -> dict[str, Any]:
        """The entries that name the unit in a document."""
        return {
            "task": self.task,
            "mode": self.mode,
            "length": self.length,
            "number": self.number,
            "kv": self.contender.spec,
            "budget": self.contender.budget,
        }


def begin_document(settings: Settings, path: Path | None = None) -> dict[str, Any]:
    """Returns a document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for a text that cannot be read.
    """
    sets = {} if settings.text is None else {"text": [read_text(settings.text)]}
    document = documents.begin_document(settings, sets, path, SCHEMA)
    document.setdefault("answers", [])
    return document


def read_text(name: str) -> str:
    """Reads the text of a file. Raises BadConfig."""
    try:
        return Path(name).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfig(f"--text {name}: cannot be read ({reason}); name a UTF-8 file") from None


def list_units(settings: Settings) -> Iterator[Unit]:
    """Yields all units to measure; those of one context stand together."""
    for length in settings.lengths:
        contenders = settings.contenders(length)
        for task in settings.tasks:
            modes = ("text",) if task == PERPLEXITY else settings.modes
            for number in range(settings.limit):
                for mode in modes:
                    for contender in contenders:
                        yield Unit(task, mode, length, number, contender)


def run_units(
    lm: LM,
    settings: Settings,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Save = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` with the answers that it lacks; returns it. Failed units are tried again.

    Raises BadModel without a tokenizer, BadConfig for lengths or texts that do not fit.
    """
    check_measurable(lm, settings)
    known_answers = [answer for answer in document["answers"] if "error" not in answer]
    document["answers"] = answers = known_answers
    key_fields = ("task", "mode", "length", "number", "kv", "budget")
    done_keys = {tuple(answer[name] for name in key_fields) for answer in known_answers}
    all_units = list(list_units(settings))
    saved_at = time.monotonic()
    for unit_index, unit in enumerate(all_units):
        if tuple(unit.key.values()) not in done_keys:
            tell(f"{unit.task}, {unit.contender.name}", unit_index, len(all_units))
            answers.append(unit.key | measure_unit(lm, settings, unit))
        if time.monotonic() - saved_at > SAVED:
            save(document)
            saved_at = time.monotonic()
    tell("longbench", len(all_units), len(all_units))
    document["cells"] = summarize_cells(document)
    save(document)
    return document


def check_measurable(lm: LM, settings: Settings) -> None:
    """Refuses, before anything runs, what cannot be measured on this model."""
    lm.encode("a text")
    target = lm.models["target"]
    later_tokens = (QUESTIONS - 1) * MORE if "turns" in settings.modes else 0
    for length in settings.lengths:
        if length + later_tokens > target.context:
            turn_text = f", and turns take {later_tokens} more" if later_tokens else ""
            raise BadConfig(
                f"--lengths {length}: {target.name} holds {target.context} tokens{turn_text}; take "
                "fewer"
            )
        for contender in settings.contenders(length):
            if contender.kv is not None:
                contender.kv.build_policy(target)
        if PERPLEXITY in settings.tasks:
            scored_text(lm, settings, length, settings.limit - 1)
        for task in settings.tasks:
            if task != PERPLEXITY:
                make_item(task, settings.seed, 0, length, token_counter(lm))


def token_counter(lm: LM) -> texts.Counted:
    return lambda text: len(lm.encode(text, special=False)) if text else 0


def measure_unit(lm: LM, settings: Settings, unit: Unit) -> dict[str, Any]:
    """Measures a unit: the entries of a document beside its key, or why it has failed."""
    try:
        if unit.task == PERPLEXITY:
            return score_unit(lm, settings, unit)
        unit_item = make_item(unit.task, settings.seed, unit.number, unit.length, token_counter(lm))
        return answer_unit(lm, unit, unit_item)
    except ForetellError as error:
        return {"error": one_line_reason(error)}


def answer_unit(lm: LM, unit: Unit, unit_item: Item) -> dict[str, Any]:
    """Asks the questions about a context; returns the answers, and what they took."""
    task = TASKS[unit.task]
    context, head = lm.encode(unit_item.context), lm.encode(HEAD, special=False)
    questions = [lm.encode(turn.question, special=False) for turn in unit_item.turns]
    golden = [lm.encode(turn.answer, special=False) for turn in unit_item.turns]
    method_runs: list[tuple[list[int], Questions]] = []
    if unit.mode == "turns":
        prompt = [*context, *head, *questions[0]]
        method_runs.append((prompt, Questions(head, questions, task.max_tokens, golden)))
    elif unit.mode == "requests" or unit.contender.kv is None:
        # Of the whole cache it does not matter when a question is known.
        method_runs.append((context, Questions(head, questions, task.max_tokens)))
    else:
        for question in questions:
            prompt = [*context, *head, *question]
            method_runs.append((prompt, Questions(head, [question], task.max_tokens, [[]])))
    for prompt, method in method_runs:
        run_method(lm, prompt, method, unit)
    answers = [answer for _, method in method_runs for answer in method.answers]
    answer_texts = [lm.decode(answer.tokens) for answer in answers]
    read_s = [method.read_s[0] for _, method in method_runs]
    reading_seconds = read_s if len(read_s) == len(answers) else read_s * len(answers)
    return {
        "place": unit_item.depth,
        "tokens": len(context),
        "texts": answer_texts,
        "wanted": [list(turn.labels) for turn in unit_item.turns],
        "scores": [
            task.score_answer(text, turn.labels)
            for text, turn in zip(answer_texts, unit_item.turns, strict=True)
        ],
        "first_s": [
            read_seconds + answer.first_s
            if unit.mode != "turns" or not answer_number
            else answer.first_s
            for answer_number, (read_seconds, answer) in enumerate(
                zip(reading_seconds, answers, strict=True)
            )
        ],
        "token_s": [answer.token_s for answer in answers],
        "held": [asdict(answer.usage) for answer in answers],
    }


def scored_text(lm: LM, settings: Settings, length: int, number: int) -> list[int]:
    """Returns the text of so many tokens whose second half is scored. Raises BadConfig."""
    if settings.text is None:
        sentences = texts.draw_sentences(random.Random(f"{settings.seed} {number} {length}"))
        filler_sentences = texts.fill_sentences(sentences, length + MORE, token_counter(lm))
        return lm.encode(" ".join(filler_sentences))[:length]
    text_ids = lm.encode(read_text(settings.text))
    min_tokens = (number + 1) * length
    if len(text_ids) < min_tokens:
        raise BadConfig(
            f"--text {settings.text}: has {len(text_ids)} tokens, and {number + 1} pieces of "
            f"{length} are scored; lower --limit or --lengths"
        )
    return text_ids[number * length : min_tokens]


def score_unit(lm: LM, settings: Settings, unit: Unit) -> dict[str, Any]:
    """Scores bits a token in each part of a text's second half."""
    text_ids = scored_text(lm, settings, unit.length, unit.number)
    half_length = len(text_ids) // 2
    method = Scored(text_ids[half_length:])
    run_method(lm, text_ids[:half_length], method, unit)
    part_edges = [len(method.bits) * part // PARTS for part in range(PARTS + 1)]
    bits = [
        sum(method.bits[part_start:part_end]) / (part_end - part_start)
        for part_start, part_end in pairwise(part_edges)
    ]
    return {"tokens": len(text_ids), "bits": bits, "held": [asdict(method.usages[0])]}


def run_method(lm: LM, prompt: Sequence[int], method: Any, unit: Unit) -> None:
    """Runs one of the methods of `asking`. Raises what went wrong."""
    lm.generate(
        list(prompt), method, kv=unit.contender.kv, temperature=0.0, max_new_tokens=1, seed=0
    )
