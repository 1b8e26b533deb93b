"""Runs the suite: task by task, every method, into a document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foretell.bench.document import begin_document
from foretell.bench.runner import Load, Tell
from foretell.bench.settings import Settings
from foretell.bench.suites.search.figures import method_cells
from foretell.bench.suites.search.functions import Function, make_free_programs, make_functions
from foretell.bench.suites.search.instructions import make_instructions
from foretell.bench.suites.search.lists import make_lists
from foretell.bench.suites.search.methods import answer_task, check_settings, compared_methods
from foretell.bench.suites.search.published import read_published
from foretell.bench.suites.search.sums import make_sums
from foretell.bench.suites.search.tasks import Task
from foretell.errors import BadConfig
from foretell.rewards.sandbox import find_walls

SCHEMA = "foretell.measure.suites.search/2"
SORTS: dict[str, Callable[[int, int], Sequence[Task]]] = {
    "functions": make_functions,
    "programs": make_free_programs,
    "sums": make_sums,
    "lists": make_lists,
    "instructions": make_instructions,
}
ITEMS = 60  # tasks of a sort, unless a number is given
SAVED = 10  # seconds between two savings at least


def prepare(paths: Sequence[str | Path], settings: Settings, limit: int) -> list[Task]:
    """The tasks of all sorts, or those of a file. Raises BadConfig or BadFile."""
    if limit == 1:
        raise BadConfig("--limit 1: --suite search compares at least 2 tasks")
    if paths:
        if settings.tasks:
            raise BadConfig("--tasks: --data has its own; leave one of them out")
        return read_published(paths[0], limit)
    prepared_tasks: list[Task] = []
    for sort in settings.tasks or ("functions",):
        if sort not in SORTS:
            raise BadConfig.field("--tasks", sort, f"one of {', '.join(SORTS)}")
        prepared_tasks += SORTS[sort](limit or ITEMS, settings.seed)
    return prepared_tasks


def begin(settings: Settings, tasks: Sequence[Task], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for,
    Unsupported where programs cannot be run safely.
    """
    if any(isinstance(task, Function) for task in tasks):
        find_walls()
    default_settings = Settings()
    for option_name in ("peers", "requests", "contexts", "rounds"):
        if getattr(settings, option_name) != getattr(default_settings, option_name):
            raise BadConfig(f"--{option_name}: --suite search has no use for it; leave it out")
    if len(settings.temperatures) > 1:
        raise BadConfig("--temperature: --suite search takes one; name one")
    check_settings(settings)
    questions_by_sort: dict[str, list[str]] = {}
    for task in tasks:
        questions_by_sort.setdefault(task.sort, []).append(task.question)
    document = begin_document(settings, questions_by_sort, path, SCHEMA)
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
    known_answers = {
        tuple(answer[field_name] for field_name in ("model", "dtype", "sort", "number", "method"))
        for answer in answers
    }
    methods_of_sort = partial(compared_methods, settings)
    model_places = [(model, dtype) for model in settings.models for dtype in settings.dtypes]
    last_saved = time.monotonic()
    done_count = 0
    for model, dtype in model_places:
        lm = None
        counts_by_sort: dict[str, int] = {}  # tasks of each sort so far
        for task in tasks:
            number = counts_by_sort.get(task.sort, 0)
            counts_by_sort[task.sort] = number + 1
            for spec in methods_of_sort(task.sort):
                if (model, dtype, task.sort, number, spec) in known_answers:
                    continue
                lm = lm or load(model, dtype)
                answer_fields = {
                    "model": model,
                    "dtype": dtype,
                    "sort": task.sort,
                    "number": number,
                }
                task_fields = {"kind": task.kind, "question": task.question, "method": spec}
                answers.append(
                    answer_fields | task_fields | answer_task(lm, task, spec, settings, number)
                )
            done_count += 1
            tell(f"{model} {task.sort}", done_count, len(model_places) * len(tasks))
            if time.monotonic() - last_saved > SAVED:
                document["cells"] = method_cells(answers, methods_of_sort)
                save(document)
                last_saved = time.monotonic()
    document["cells"] = method_cells(answers, methods_of_sort)
    save(document)
    return document
