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
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def format_duration(seconds: float) -> str:
    """Writes seconds for people: 45 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


class Bar(Progress):
    """A bar on a terminal; elsewhere a line every EVERY seconds in which it is updated.

    `quiet`: shows neither; `clock`: returns seconds.
    """

    def __init__(
        self,
        *bar_columns: ProgressColumn,
        console: Console,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ):
        is_shown = console.is_terminal and not quiet
        super().__init__(*bar_columns, console=console, disable=not is_shown, **options)
        self.prints_lines = not (is_shown or quiet)
        self.clock = clock
        self.last_printed = self.started_at = clock()

    def update(self, task_id: TaskID, **fields: Any) -> None:  # type: ignore[override]
        super().update(task_id, **fields)
        self._print_progress(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_progress(task_id)

    def _print_progress(self, task_id: TaskID) -> None:
        current_time = self.clock()
        if not self.prints_lines or current_time - self.last_printed < EVERY:
            return
        self.last_printed = current_time
        task = self._tasks[task_id]
        total_text = "" if task.total is None else f" of {task.total:,.0f}"
        _print_elapsed(
            self.console,
            f"{task.description}: {task.completed:,.0f}{total_text}",
            current_time - self.started_at,
        )


@contextlib.contextmanager
def show_working(activity: str, console: Console) -> Iterator[None]:
    """Shows that something goes on: a status on a terminal, elsewhere a line every EVERY
    seconds.
    """
    if console.is_terminal:
        with console.status(activity):
            yield
        return
    is_over = threading.Event()
    started_at = time.monotonic()

    def speak() -> None:
        while not is_over.wait(EVERY):
            _print_elapsed(console, activity, time.monotonic() - started_at)

    printing_thread = threading.Thread(target=speak, daemon=True)
    printing_thread.start()
    try:
        yield
    finally:
        is_over.set()
        printing_thread.join()


def _print_elapsed(console: Console, activity: str, seconds: float) -> None:
    console.print(f"{activity}, {format_duration(seconds)}", soft_wrap=True, markup=False)
