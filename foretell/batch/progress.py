"""How far a batch is: a bar on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from foretell.progress import format_duration

EVERY = 30.0  # seconds between two lines


class Meter:
    """Counts requests that are done, and says when the rest will be.

    `total`: requests to do now; `earlier`: done by earlier runs; `clock`: seconds.
    """

    def __init__(self, total: int, earlier: int = 0, clock: Callable[[], float] = time.monotonic):
        self.total = total
        self.earlier = earlier
        self.clock = clock
        self.began = clock()
        self.done = 0
        self.failed = 0
        self.tokens = 0  # of answers
        self.prompt_tokens = 0

    def count(self, failed: bool, tokens: int = 0, prompt_tokens: int = 0) -> None:
        """Counts a request that is done."""
        self.done += 1
        self.failed += failed
        self.tokens += tokens
        self.prompt_tokens += prompt_tokens

    @property
    def seconds(self) -> float:
        return max(1e-9, self.clock() - self.began)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes if it goes on like this; None: nothing is known."""
        if not self.done:
            return None
        return self.seconds / self.done * (self.total - self.done)

    def words(self) -> str:
        """Speed, failures and the time that is left."""
        parts = [f"{self.tokens / self.seconds:,.0f} tokens/s"]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.seconds_left is not None:
            parts.append(f"about {format_duration(self.seconds_left)} left")
        return ", ".join(parts)

    def line(self) -> str:
        """How many requests are done, with speed, failures and time."""
        return f"{self.earlier + self.done:,} of {self.earlier + self.total:,} done, {self.words()}"


@contextmanager
def show_meter(meter: Meter, console: Console) -> Iterator[Callable[[], None]]:
    """Shows a meter on standard error; gives what has to be called about once a second."""
    if not console.is_terminal:
        yield line_ticker(meter, lambda text: console.print(text, soft_wrap=True))
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        total_requests = meter.earlier + meter.total
        bar = progress.add_task("", total=total_requests, completed=meter.earlier)

        def tick() -> None:
            completed = meter.earlier + meter.done
            progress.update(bar, completed=completed, description=meter.words())

        tick()
        yield tick


def line_ticker(meter: Meter, write_line: Callable[[str], None]) -> Callable[[], None]:
    """Returns a function that writes a line if the last one was EVERY seconds ago."""
    last_time = meter.clock()

    def tick() -> None:
        nonlocal last_time
        if meter.clock() - last_time >= EVERY:
            last_time = meter.clock()
            write_line(meter.line())

    return tick
