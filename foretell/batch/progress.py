"""How far a batch is: a bar on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from foretell.progress import duration

EVERY = 30.0  # seconds between two lines


class Meter:
    """Counts what is done, and says when the rest will be.

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
        """One more is done."""
        self.done += 1
        self.failed += failed
        self.tokens += tokens
        self.prompt_tokens += prompt_tokens

    @property
    def seconds(self) -> float:
        return max(1e-9, self.clock() - self.began)

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes if it goes on like this; None: nothing is known."""
        if not self.done:
            return None
        return self.seconds / self.done * (self.total - self.done)

    def words(self) -> str:
        """Speed, failures and the time that is left."""
        parts = [f"{self.tokens / self.seconds:,.0f} tokens/s"]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.left is not None:
            parts.append(f"about {duration(self.left)} left")
        return ", ".join(parts)

    def line(self) -> str:
        """All of it."""
        return f"{self.earlier + self.done:,} of {self.earlier + self.total:,} done, {self.words()}"


@contextmanager
def shown(meter: Meter, console: Console) -> Iterator[Callable[[], None]]:
    """Shows a meter on standard error; gives what has to be called about once a second."""
    if not console.is_terminal:
        yield lines(meter, lambda text: console.print(text, soft_wrap=True))
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        whole = meter.earlier + meter.total
        bar = progress.add_task("", total=whole, completed=meter.earlier)

        def tick() -> None:
            done = meter.earlier + meter.done
            progress.update(bar, completed=done, description=meter.words())

        tick()
        yield tick


def lines(meter: Meter, write: Callable[[str], None]) -> Callable[[], None]:
    """What writes a line if the last one was EVERY seconds ago."""
    last = meter.clock()

    def tick() -> None:
        nonlocal last
        if meter.clock() - last >= EVERY:
            last = meter.clock()
            write(meter.line())

    return tick
