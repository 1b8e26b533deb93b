"""What suites share: which settings they refuse, and tasks answered one by one into a document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench.document import begin as begin_document
from foretell.bench.paired import interval
from foretell.bench.runner import Load, Tell
from foretell.bench.settings import Settings
from foretell.bench.turns import reason
from foretell.errors import BadConfig, ForetellError

if TYPE_CHECKING:
    from foretell.api.lm import LM

SAVED = 10  # seconds between two savings at least
# What a suite may have no use for, as options of the command.
OPTIONS = {
    "draft": "--draft",
    "methods": "--methods",
    "warps": "--warp",
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


def begin(
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
    usual = Settings()
    for name, option in OPTIONS.items():
        if name not in uses and getattr(settings, name) != getattr(usual, name):
            raise BadConfig(f"{option}: --suite {suite} has no use for it; leave it out")
    if len(settings.temperatures) > 1:
        raise BadConfig(f"--temperature: --suite {suite} takes one; name one")
    schema = f"foretell.bench.suites.{suite}/1"
    document = begin_document(settings, {"tasks": tasks}, path, schema)
    document.setdefault("answers", [])
    return document


def answered(
    settings: Settings,
    count: int,
    load: Load,
    document: dict[str, Any],
    work: Work,
    summary: Summary,
    tell: Tell,
    save: Callable[[dict[str, Any]], None],
    together: int = 1,
) -> dict[str, Any]:
    """Fills `document` with the answers to tasks 0 to `count` - 1 that it lacks, `together` at a
    time, and with the figures of every model; returns it. What failed is tried again.
    """
    answers: list[Answer] = [one for one in document["answers"] if "error" not in one]
    document["answers"] = answers
    places = [(model, dtype) for model in settings.models for dtype in settings.dtypes]
    known = {(one["model"], one["dtype"], one["number"]) for one in answers}
    saved = time.monotonic()
    for place, (model, dtype) in enumerate(places):
        todo = [number for number in range(count) if (model, dtype, number) not in known]
        lm = load(model, dtype) if todo else None
        about = {"model": model, "dtype": dtype}
        for first in range(0, len(todo), together):
            assert lm is not None
            numbers = todo[first : first + together]
            for number, answer in zip(numbers, _tried(lm, numbers, work), strict=True):
                answers.append(about | {"number": number} | answer)
            done = count - len(todo) + first + len(numbers)
            tell(model, place * count + done, len(places) * count)
            if time.monotonic() - saved > SAVED:
                save(document)
                saved = time.monotonic()
    cells = []
    for model, dtype in places:
        own = [one for one in answers if (one["model"], one["dtype"]) == (model, dtype)]
        good = [one for one in own if "error" not in one]
        if good:
            cells.append({"model": model, "dtype": dtype, "tasks": len(good)} | summary(good))
    document["cells"] = cells
    save(document)
    return document


def _tried(lm: LM, numbers: Sequence[int], work: Work) -> list[Answer]:
    """A failure of several together is looked for one by one."""
    try:
        return work(lm, numbers)
    except ForetellError as error:
        if len(numbers) == 1:
            return [{"error": reason(error)}]
    return [answer for number in numbers for answer in _tried(lm, [number], work)]


def failures(document: dict[str, Any]) -> list[str]:
    """A line for each task that could not be answered."""
    return failures_of(
        document, lambda one: f"{one['model']}, {one['dtype']}, task {one['number']}"
    )


def failures_of(document: dict[str, Any], where: Callable[[Answer], str]) -> list[str]:
    """The same for answers that are named by `where`."""
    return [f"{where(one)}: {one['error']}" for one in document["answers"] if "error" in one]


def more(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """How much more `ours` are than `theirs`, task by task, with a 95 % interval."""
    mean, low, high = interval([one - other for one, other in zip(ours, theirs, strict=True)])
    return {"mean": mean, "low": low, "high": high}


def told(difference: dict[str, float], form: str = "+.1%") -> str:
    """A difference and its interval, as a table shows them."""
    low, high = (format(difference[name], form) for name in ("low", "high"))
    return f"{difference['mean']:{form}} ({low} to {high})"
