"""What suites share: which settings they refuse, and tasks answered one by one into a document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench.document import begin_document
from foretell.bench.paired import bootstrap_interval
from foretell.bench.runner import Load, Tell
from foretell.bench.settings import Settings
from foretell.bench.turns import one_line_reason
from foretell.errors import BadConfig, ForetellError

if TYPE_CHECKING:
    from foretell.api.lm import LM

SAVED = 10  # seconds between two savings at least
# What a suite may have no use for, as options of the command.
OPTIONS = {
    "draft": "--draft",
    "methods": "--methods",
    "processors": "--processor",
    "rewards": "--reward",
    "peers": "--peers",
    "rounds": "--rounds",
    "requests": "--requests",
    "contexts": "--contexts",
}
Answer = dict[str, Any]
# The answers to tasks of these numbers, in their order.
Work = Callable[["LM", Sequence[int]], list[Answer]]
# The figures of one model from its answers.
Summary = Callable[[Sequence[Answer]], dict[str, Any]]


def begin_suite(
    settings: Settings,
    suite: str,
    tasks: Sequence[Any],
    path: Path | None,
    uses: Sequence[str] = (),
) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    `uses`: those of OPTIONS that mean something to the suite. Raises BadFile where it was not begun
    so, BadConfig for others that are given and for several temperatures.
    """
    default_settings = Settings()
    for field_name, option in OPTIONS.items():
        if field_name not in uses and getattr(settings, field_name) != getattr(
            default_settings, field_name
        ):
            raise BadConfig(f"{option}: --suite {suite} has no use for it; leave it out")
    if len(settings.temperatures) > 1:
        raise BadConfig(f"--temperature: --suite {suite} takes one; name one")
    schema = f"foretell.bench.suites.{suite}/1"
    document = begin_document(settings, {"tasks": tasks}, path, schema)
    document.setdefault("answers", [])
    return document


def answer_all(
    settings: Settings,
    count: int,
    load: Load,
    document: dict[str, Any],
    answer_tasks: Work,
    summarise: Summary,
    tell: Tell,
    save: Callable[[dict[str, Any]], None],
    batch_size: int = 1,
) -> dict[str, Any]:
    """Fills `document` with the answers to tasks 0 to `count` - 1 that it lacks, `batch_size` at a
    time, and with the figures of every model; returns it. What failed is tried again.
    """
    answers: list[Answer] = [
        stored_answer for stored_answer in document["answers"] if "error" not in stored_answer
    ]
    document["answers"] = answers
    places = [(model, dtype) for model in settings.models for dtype in settings.dtypes]
    known_answers = {
        (stored_answer["model"], stored_answer["dtype"], stored_answer["number"])
        for stored_answer in answers
    }
    last_saved = time.monotonic()
    for place_index, (model, dtype) in enumerate(places):
        missing_numbers = [
            number for number in range(count) if (model, dtype, number) not in known_answers
        ]
        lm = load(model, dtype) if missing_numbers else None
        model_fields = {"model": model, "dtype": dtype}
        for batch_start in range(0, len(missing_numbers), batch_size):
            assert lm is not None
            task_numbers = missing_numbers[batch_start : batch_start + batch_size]
            for number, answer in zip(
                task_numbers, _try_tasks(lm, task_numbers, answer_tasks), strict=True
            ):
                answers.append(model_fields | {"number": number} | answer)
            done_count = count - len(missing_numbers) + batch_start + len(task_numbers)
            tell(model, place_index * count + done_count, len(places) * count)
            if time.monotonic() - last_saved > SAVED:
                save(document)
                last_saved = time.monotonic()
    cells = []
    for model, dtype in places:
        model_answers = [
            stored_answer
            for stored_answer in answers
            if (stored_answer["model"], stored_answer["dtype"]) == (model, dtype)
        ]
        successful_answers = [
            stored_answer for stored_answer in model_answers if "error" not in stored_answer
        ]
        if successful_answers:
            cells.append(
                {"model": model, "dtype": dtype, "tasks": len(successful_answers)}
                | summarise(successful_answers)
            )
    document["cells"] = cells
    save(document)
    return document


def _try_tasks(lm: LM, task_numbers: Sequence[int], answer_tasks: Work) -> list[Answer]:
    """A failure of several together is looked for one by one."""
    try:
        return answer_tasks(lm, task_numbers)
    except ForetellError as error:
        if len(task_numbers) == 1:
            return [{"error": one_line_reason(error)}]
    return [answer for number in task_numbers for answer in _try_tasks(lm, [number], answer_tasks)]


def failure_lines(document: dict[str, Any]) -> list[str]:
    """A line for each task that could not be answered."""
    return describe_failures(
        document, lambda answer: f"{answer['model']}, {answer['dtype']}, task {answer['number']}"
    )


def describe_failures(
    document: dict[str, Any], describe_answer: Callable[[Answer], str]
) -> list[str]:
    """Returns a line for each failed answer, named by `describe_answer`."""
    return [
        f"{describe_answer(answer)}: {answer['error']}"
        for answer in document["answers"]
        if "error" in answer
    ]


def compare_scores(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Compares scores: how much more `ours` are, task by task, with a 95 % interval."""
    mean_difference, lower_bound, upper_bound = bootstrap_interval(
        [our_score - their_score for our_score, their_score in zip(ours, theirs, strict=True)]
    )
    return {"mean": mean_difference, "low": lower_bound, "high": upper_bound}


def format_difference(difference: dict[str, float], number_format: str = "+.1%") -> str:
    """A difference and its interval, as a table shows them."""
    lower_text, upper_text = (format(difference[name], number_format) for name in ("low", "high"))
    return f"{difference['mean']:{number_format}} ({lower_text} to {upper_text})"
