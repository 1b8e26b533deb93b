"""How far something is, on standard error: moving on a terminal, else a line every so often."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

EVERY = 10.0  # seconds between two lines
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


def duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


class Bar(Progress):
    """A bar on a terminal; elsewhere a line every EVERY seconds in which it is told something.

    `quiet`: neither; `clock`: seconds.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        console: Console,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ):
        shown = console.is_terminal and not quiet
        super().__init__(*columns, console=console, disable=not shown, **options)
        self.speaks = not (shown or quiet)
        self.clock = clock
        self.spoke = self.began = clock()

    def update(self, task_id: TaskID, **fields: Any) -> None:  # type: ignore[override]
        super().update(task_id, **fields)
        self._speak(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._speak(task_id)

    def _speak(self, task_id: TaskID) -> None:
        now = self.clock()
        if not self.speaks or now - self.spoke < EVERY:
            return
        self.spoke = now
        task = self._tasks[task_id]
        of = "" if task.total is None else f" of {task.total:,.0f}"
        _say(self.console, f"{task.description}: {task.completed:,.0f}{of}", now - self.began)


@contextlib.contextmanager
def working(what: str, console: Console) -> Iterator[None]:
    """Says that something goes on: a status on a terminal, elsewhere a line every EVERY seconds."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    over = threading.Event()
    began = time.monotonic()

    def speak() -> None:
        while not over.wait(EVERY):
            _say(console, what, time.monotonic() - began)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


def _say(console: Console, what: str, seconds: float) -> None:
    console.print(f"{what}, {duration(seconds)}", soft_wrap=True, markup=False)
