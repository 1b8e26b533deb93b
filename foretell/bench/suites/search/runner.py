"""Runs the suite: task by task, every method, into a document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foretell.bench.document import begin as begin_document
from foretell.bench.runner import Load, Tell
from foretell.bench.settings import Settings
from foretell.bench.suites.search.figures import cells
from foretell.bench.suites.search.functions import Function, functions, programs
from foretell.bench.suites.search.instructions import instructions
from foretell.bench.suites.search.lists import lists
from foretell.bench.suites.search.methods import answer, check, methods
from foretell.bench.suites.search.published import read
from foretell.bench.suites.search.sums import sums
from foretell.bench.suites.search.tasks import Task
from foretell.errors import BadConfig
from foretell.rewards.sandbox import walls

SCHEMA = "foretell.bench.suites.search/2"
SORTS: dict[str, Callable[[int, int], Sequence[Task]]] = {
    "functions": functions,
    "programs": programs,
    "sums": sums,
    "lists": lists,
    "instructions": instructions,
}
ITEMS = 60  # tasks of a sort, unless a number is given
SAVED = 10  # seconds between two savings at least


def prepare(given: Sequence[str | Path], settings: Settings, limit: int) -> list[Task]:
    """The tasks of all sorts, or those of a file. Raises BadConfig or BadFile."""
    if limit == 1:
        raise BadConfig("--limit 1: --suite search compares at least 2 tasks")
    if given:
        if settings.tasks:
            raise BadConfig("--tasks: --data has its own; leave one of them out")
        return read(given[0], limit)
    found: list[Task] = []
    for sort in settings.tasks or ("functions",):
        if sort not in SORTS:
            raise BadConfig.field("--tasks", sort, f"one of {', '.join(SORTS)}")
        found += SORTS[sort](limit or ITEMS, settings.seed)
    return found


def begin(settings: Settings, tasks: Sequence[Task], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for,
    Unsupported where programs cannot be run safely.
    """
    if any(isinstance(task, Function) for task in tasks):
        walls()
    usual = Settings()
    for name in ("peers", "requests", "contexts", "rounds"):
        if getattr(settings, name) != getattr(usual, name):
            raise BadConfig(f"--{name}: --suite search has no use for it; leave it out")
    if len(settings.temperatures) > 1:
        raise BadConfig("--temperature: --suite search takes one; name one")
    check(settings)
    sets: dict[str, list[str]] = {}
    for task in tasks:
        sets.setdefault(task.sort, []).append(task.question)
    document = begin_document(settings, sets, path, SCHEMA)
    document.setdefault("answers", [])
    return document


def run(
    settings: Settings,
    tasks: Sequence[Task],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it.

    Calls `save(document)` now and then, and at the end.
    """
    answers: list[dict[str, Any]] = document["answers"]
    known = {
        tuple(one[part] for part in ("model", "dtype", "sort", "number", "method"))
        for one in answers
    }
    of_sort = partial(methods, settings)
    places = [(model, dtype) for model in settings.models for dtype in settings.dtypes]
    saved = time.monotonic()
    done = 0
    for model, dtype in places:
        lm = None
        count: dict[str, int] = {}  # tasks of each sort so far
        for task in tasks:
            number = count.get(task.sort, 0)
            count[task.sort] = number + 1
            for spec in of_sort(task.sort):
                if (model, dtype, task.sort, number, spec) in known:
                    continue
                lm = lm or load(model, dtype)
                about = {"model": model, "dtype": dtype, "sort": task.sort, "number": number}
                asked = {"kind": task.kind, "question": task.question, "method": spec}
                answers.append(about | asked | answer(lm, task, spec, settings, number))
            done += 1
            tell(f"{model} {task.sort}", done, len(places) * len(tasks))
            if time.monotonic() - saved > SAVED:
                document["cells"] = cells(answers, of_sort)
                save(document)
                saved = time.monotonic()
    document["cells"] = cells(answers, of_sort)
    save(document)
    return document
