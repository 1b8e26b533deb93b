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
from foretell.bench.turns import reason
from foretell.errors import BadConfig, ForetellError
from foretell.longbench import texts
from foretell.longbench.asking import Questions, Scored
from foretell.longbench.report import cells
from foretell.longbench.settings import PERPLEXITY, Contender, Settings
from foretell.longbench.tasks import MORE, QUESTIONS, TASKS, Item, item

if TYPE_CHECKING:
    from foretell.api.lm import LM

SCHEMA = "foretell.longbench/1"
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
        """What names it in a document."""
        return {
            "task": self.task,
            "mode": self.mode,
            "length": self.length,
            "number": self.number,
            "kv": self.contender.spec,
            "budget": self.contender.budget,
        }


def begin(settings: Settings, path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for a text that cannot be read.
    """
    sets = {} if settings.text is None else {"text": [read(settings.text)]}
    document = documents.begin(settings, sets, path, SCHEMA)
    document.setdefault("answers", [])
    return document


def read(name: str) -> str:
    """The text of a file. Raises BadConfig."""
    try:
        return Path(name).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfig(f"--text {name}: cannot be read ({what}); name a UTF-8 file") from None


def units(settings: Settings) -> Iterator[Unit]:
    """All there is to measure; everything about one context stands together."""
    for length in settings.lengths:
        contenders = settings.contenders(length)
        for task in settings.tasks:
            modes = ("text",) if task == PERPLEXITY else settings.modes
            for number in range(settings.limit):
                for mode in modes:
                    for contender in contenders:
                        yield Unit(task, mode, length, number, contender)


def run(
    lm: LM,
    settings: Settings,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Save = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` with the answers that it lacks; returns it. What failed is tried again.

    Raises BadModel without a tokenizer, BadConfig for lengths or texts that do not fit.
    """
    check(lm, settings)
    known = [one for one in document["answers"] if "error" not in one]
    document["answers"] = answers = known
    names = ("task", "mode", "length", "number", "kv", "budget")
    done = {tuple(one[name] for name in names) for one in known}
    wanted = list(units(settings))
    saved = time.monotonic()
    for place, unit in enumerate(wanted):
        if tuple(unit.key.values()) not in done:
            tell(f"{unit.task}, {unit.contender.name}", place, len(wanted))
            answers.append(unit.key | measured(lm, settings, unit))
        if time.monotonic() - saved > SAVED:
            save(document)
            saved = time.monotonic()
    tell("longbench", len(wanted), len(wanted))
    document["cells"] = cells(document)
    save(document)
    return document


def check(lm: LM, settings: Settings) -> None:
    """Refuses, before anything runs, what cannot be measured on this model."""
    lm.encode("a text")
    target = lm.models["target"]
    later = (QUESTIONS - 1) * MORE if "turns" in settings.modes else 0
    for length in settings.lengths:
        if length + later > target.context:
            beside = f", and turns take {later} more" if later else ""
            raise BadConfig(
                f"--lengths {length}: {target.name} holds {target.context} tokens{beside}; take "
                "fewer"
            )
        for contender in settings.contenders(length):
            if contender.kv is not None:
                contender.kv.policy(target)
        if PERPLEXITY in settings.tasks:
            whole(lm, settings, length, settings.limit - 1)
        for task in settings.tasks:
            if task != PERPLEXITY:
                item(task, settings.seed, 0, length, counter(lm))


def counter(lm: LM) -> texts.Counted:
    return lambda text: len(lm.encode(text, special=False)) if text else 0


def measured(lm: LM, settings: Settings, unit: Unit) -> dict[str, Any]:
    """What a document says of a unit beside its key, or why it has failed."""
    try:
        if unit.task == PERPLEXITY:
            return scored(lm, settings, unit)
        made = item(unit.task, settings.seed, unit.number, unit.length, counter(lm))
        return asked(lm, unit, made)
    except ForetellError as error:
        return {"error": reason(error)}


def asked(lm: LM, unit: Unit, made: Item) -> dict[str, Any]:
    """Answers to the questions about a context, and what they took."""
    task = TASKS[unit.task]
    context, head = lm.encode(made.context), lm.encode(HEAD, special=False)
    questions = [lm.encode(turn.question, special=False) for turn in made.turns]
    golden = [lm.encode(turn.answer, special=False) for turn in made.turns]
    runs: list[tuple[list[int], Questions]] = []
    if unit.mode == "turns":
        prompt = [*context, *head, *questions[0]]
        runs.append((prompt, Questions(head, questions, task.most, golden)))
    elif unit.mode == "requests" or unit.contender.kv is None:
        # Of the whole cache it does not matter when a question is known.
        runs.append((context, Questions(head, questions, task.most)))
    else:
        for question in questions:
            prompt = [*context, *head, *question]
            runs.append((prompt, Questions(head, [question], task.most, [[]])))
    for prompt, method in runs:
        generate(lm, prompt, method, unit)
    answers = [answer for _, method in runs for answer in method.answers]
    said = [lm.decode(answer.tokens) for answer in answers]
    read_s = [method.read_s[0] for _, method in runs]
    reading = read_s if len(read_s) == len(answers) else read_s * len(answers)
    return {
        "place": made.place,
        "tokens": len(context),
        "texts": said,
        "wanted": [list(turn.wanted) for turn in made.turns],
        "scores": [
            task.score(text, turn.wanted) for text, turn in zip(said, made.turns, strict=True)
        ],
        "first_s": [
            own + answer.first_s if unit.mode != "turns" or not number else answer.first_s
            for number, (own, answer) in enumerate(zip(reading, answers, strict=True))
        ],
        "token_s": [answer.token_s for answer in answers],
        "held": [asdict(answer.held) for answer in answers],
    }


def whole(lm: LM, settings: Settings, length: int, number: int) -> list[int]:
    """The text of so many tokens whose second half is scored. Raises BadConfig."""
    if settings.text is None:
        sentences = texts.filler(random.Random(f"{settings.seed} {number} {length}"))
        made = texts.filled(sentences, length + MORE, counter(lm))
        return lm.encode(" ".join(made))[:length]
    ids = lm.encode(read(settings.text))
    least = (number + 1) * length
    if len(ids) < least:
        raise BadConfig(
            f"--text {settings.text}: has {len(ids)} tokens, and {number + 1} pieces of {length} "
            "are scored; lower --limit or --lengths"
        )
    return ids[number * length : least]


def scored(lm: LM, settings: Settings, unit: Unit) -> dict[str, Any]:
    """Bits a token in each part of a text's second half."""
    ids = whole(lm, settings, unit.length, unit.number)
    half = len(ids) // 2
    method = Scored(ids[half:])
    generate(lm, ids[:half], method, unit)
    edges = [len(method.bits) * part // PARTS for part in range(PARTS + 1)]
    bits = [sum(method.bits[first:end]) / (end - first) for first, end in pairwise(edges)]
    return {"tokens": len(ids), "bits": bits, "held": [asdict(method.held[0])]}


def generate(lm: LM, prompt: Sequence[int], method: Any, unit: Unit) -> None:
    """Runs one of the methods of `asking`. Raises what went wrong."""
    lm.generate(
        list(prompt), method, kv=unit.contender.kv, temperature=0.0, max_new_tokens=1, seed=0
    )
