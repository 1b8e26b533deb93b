"""What the server's log says: one record a line, so many a second at most, nothing forged.

Names and texts of clients reach it, in paths and in what errors say. What is no printable character
is escaped, and only the lines of a traceback begin with a space.
"""

from __future__ import annotations

import logging
from typing import IO, Any

MOST = {logging.INFO: 100, logging.WARNING: 20, logging.ERROR: 10}  # records a second of a level


def printable(text: str, but: str = "") -> str:
    """The same with everything escaped that would not show as a character, except `but`."""
    if text.isprintable():
        return text
    parts = [c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text]
    return "".join(parts)


class Lines(logging.Formatter):
    """One line a record; those of a traceback follow, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable(text, "\n").split("\n"))


class Bounded(logging.Filter):
    """Passes so many records of a level a second; the next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, int] = {}
        self.counts: dict[int, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        level, second = record.levelno, int(record.created)
        most = MOST.get(level, MOST[logging.INFO])
        left_out = 0
        if self.seconds.get(level) != second:
            left_out = self.counts.get(level, 0) - most
            self.seconds[level], self.counts[level] = second, 0
        self.counts[level] += 1
        if left_out > 0:
            record.msg = f"{record.getMessage()} ({left_out} records before it were left out)"
            record.args = ()
        return self.counts[level] <= most


def begin(stream: IO[str]) -> None:
    """Everything that this process logs goes there."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(Bounded())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    for chatty in ("uvicorn", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
