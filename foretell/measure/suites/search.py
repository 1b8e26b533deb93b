"""The suite `search`: do public tests find programs that pass hidden ones, at equal forwards?

Each task is answered in four ways. `plain` is greedy decoding. `pg-td` searches with the public
tests as its reward. What it has computed, counted in forwards of one text each, is what the others
may spend: as many samples are drawn as fit, at least one; `sampling` answers with the first of
them, `best-of` with the one that passes most public tests. An answer is right if it passes all
hidden tests. Differences between pg-td and the others are taken task by task, with a 95 % interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import BadConfig
from foretell.measure.bench.document import begin as begin_document
from foretell.measure.bench.runner import Load, Tell
from foretell.measure.bench.settings import Settings
from foretell.measure.paired import interval
from foretell.measure.programs import STOPS, Program, programs
from foretell.ops.cases import verdicts
from foretell.ops.rewards import Reward
from foretell.ops.sandbox import Limits, walls
from foretell.strategies.pg_td import PgTd

if TYPE_CHECKING:
    from foretell.api import LM

SCHEMA = "foretell.measure.suites.search/1"
WAYS = ("plain", "sampling", "best-of", "pg-td")
TOGETHER = 8  # samples that are drawn side by side
ITEMS = 60  # tasks, unless a number is given
ROLLOUTS = 16  # of pg-td
TEMPERATURE = 0.8  # of the samples, unless one above 0 is given
SAVED = 10  # seconds between two savings at least
HEAD = ["answer", "solved", "hidden tests", "public tests", "forwards", "pg-td solves more"]
LIMITS = Limits(seconds=5.0, cpu=5)


class Tried:
    """The programs of a task that have been run, each once, and the shares of tests they pass."""

    def __init__(self, task: Program, head: str):
        self.tests = [*task.public, *task.hidden]
        self.public = len(task.public)
        self.head = head  # what every program begins with
        self.known: dict[str, list[bool]] = {}

    def shares(self, text: str) -> tuple[float, float]:
        """Of the public tests and of the hidden ones."""
        if text not in self.known:
            self.known[text] = verdicts(self.head + text, self.tests, LIMITS)
        passed = self.known[text]
        parts = passed[: self.public], passed[self.public :]
        public, hidden = (sum(part) / len(part) for part in parts)
        return public, hidden


@dataclass(frozen=True, eq=False)
class Passes(Reward):
    """The share of a task's public tests that a program passes."""

    tried: Tried

    partial = False

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [self.tried.shares(text)[0] for text in texts]


def prepare(given: Sequence[str], settings: Settings, limit: int) -> list[Program]:
    """The tasks. Raises BadConfig."""
    if given:
        raise BadConfig("--schemas: --suite search makes its own tasks; leave it out")
    if limit == 1:
        raise BadConfig("--limit 1: --suite search compares at least 2 tasks")
    return programs(limit or ITEMS, settings.seed)


def begin(settings: Settings, tasks: Sequence[Program], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for,
    Unsupported where programs cannot be run safely.
    """
    walls()
    usual = Settings()
    for name in ("peers", "requests", "contexts", "methods", "rounds"):
        if getattr(settings, name) != getattr(usual, name):
            raise BadConfig(f"--{name}: --suite search has no use for it; leave it out")
    if len(settings.temperatures) > 1:
        raise BadConfig("--temperature: --suite search takes one; name one")
    document = begin_document(settings, {"tasks": [task.question for task in tasks]}, path, SCHEMA)
    document.setdefault("answers", [])
    return document


def run(
    settings: Settings,
    tasks: Sequence[Program],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it.

    Calls `save(document)` now and then, and at the end.
    """
    places = [(model, dtype) for model in settings.models for dtype in settings.dtypes]
    answers: list[dict[str, Any]] = document["answers"]
    known = {(one["model"], one["dtype"], one["number"]) for one in answers}
    saved = time.monotonic()
    for place, (model, dtype) in enumerate(places):
        todo = [number for number in range(len(tasks)) if (model, dtype, number) not in known]
        lm = load(model, dtype) if todo else None
        for number in todo:
            assert lm is not None
            about = {"model": model, "dtype": dtype, "number": number}
            answers.append(about | answer(lm, tasks[number], settings, number))
            tell(model, place * len(tasks) + number + 1, len(places) * len(tasks))
            if time.monotonic() - saved > SAVED:
                save(document)
                saved = time.monotonic()
    cells = []
    for model, dtype in places:
        own = [one for one in answers if (one["model"], one["dtype"]) == (model, dtype)]
        cells.append({"model": model, "dtype": dtype, "tasks": len(own)} | summary(own))
    document["cells"] = cells
    save(document)
    return document


def asked(lm: LM, task: Program) -> tuple[list[int], str]:
    """The prompt as token ids, and the first lines of the program, which the answer goes on with.

    They do not end with a line's end: with the blanks behind it that is often one token.
    """
    if lm.tokenizer is None or not lm.tokenizer.chat_template:
        return lm.prompt_ids(task.head), task.head
    question = lm.prompt_ids([{"role": "user", "content": task.question}])
    return [*question, *lm.encode(f"```python\n{task.begins}", special=False)], task.begins


def answer(lm: LM, task: Program, settings: Settings, number: int) -> dict[str, Any]:
    """What became of a task in each way."""
    prompt, head = asked(lm, task)
    options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "stop": STOPS}
    tried = Tried(task, head)
    reward = Passes(tried)
    plain = lm.generate(prompt, "plain", **options)
    search = PgTd(reward, rollouts=ROLLOUTS, enough=1.0)
    searched = lm.generate(prompt, search, **options)
    paid = searched.stats.calls["target"]
    samples = drawn(lm, prompt, settings, number, paid, options)
    values = reward.scores("", [one.text for one in samples])
    best = max(range(len(samples)), key=lambda place: values[place])
    texts = {
        "plain": plain.text,
        "sampling": samples[0].text,
        "best-of": samples[best].text,
        "pg-td": searched.text,
    }
    return {
        "kind": task.kind,
        "question": task.question,
        "programs": {name: head + text for name, text in texts.items()},
        "public": {name: tried.shares(text)[0] for name, text in texts.items()},
        "hidden": {name: tried.shares(text)[1] for name, text in texts.items()},
        "forwards": {
            "plain": len(plain.tokens),
            "sampling": len(samples[0].tokens),
            "best-of": sum(len(one.tokens) for one in samples),
            "pg-td": paid,
        },
        "samples": len(samples),
        "searched": max(1, len(searched.samples)),
    }


def drawn(
    lm: LM, prompt: list[int], settings: Settings, number: int, paid: int, options: dict[str, Any]
) -> list[Any]:
    """The first samples whose tokens, one forward each, are paid for; at least one."""
    found: list[Any] = []
    spent = 0
    while True:
        seed = (settings.seed * 1_000_003 + number) * 1_000 + len(found)
        more = lm.generate(
            [prompt] * TOGETHER,
            "plain",
            temperature=settings.temperatures[0] or TEMPERATURE,
            seed=[seed + place for place in range(TOGETHER)],
            **options,
        )
        for one in more:
            spent += len(one.tokens)
            if found and spent > paid:
                return found
            found.append(one)


def summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each way: tasks solved, tests passed, forwards; what pg-td has more, with intervals."""
    right = {name: [float(one["hidden"][name] == 1) for one in answers] for name in WAYS}
    found: dict[str, Any] = {}
    for name in WAYS:
        pairs = zip(right["pg-td"], right[name], strict=True)
        mean, low, high = interval([ours - theirs for ours, theirs in pairs])
        found[name] = {
            "solved": sum(right[name]) / len(answers),
            "hidden": sum(one["hidden"][name] for one in answers) / len(answers),
            "public": sum(one["public"][name] for one in answers) / len(answers),
            "forwards": sum(one["forwards"][name] for one in answers) / len(answers),
            "pg_td_more": {"mean": mean, "low": low, "high": high},
        }
    return found


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first, for every model."""
    found = []
    for cell in document["cells"]:
        rows = [HEAD]
        for name in WAYS:
            one, more = cell[name], cell[name]["pg_td_more"]
            shares = [f"{one[part]:.1%}" for part in ("solved", "hidden", "public")]
            pairs = f"{more['mean']:+.1%} ({more['low']:+.1%} to {more['high']:+.1%})"
            last = "" if name == "pg-td" else pairs
            rows.append([name, *shares, f"{one['forwards']:.0f}", last])
        found.append((f"search, {cell['model']}, {cell['dtype']}: {cell['tasks']} tasks", rows))
    return found


def failures(document: dict[str, Any]) -> list[str]:
    """None: whatever is no program that passes is counted."""
    return []
