"""The server's log: one record a line, a bounded number a second, nothing forged.

Names and texts of clients reach it, in paths and in what errors say. What is no printable character
is escaped, and only the lines of a traceback begin with a space.
"""

from __future__ import annotations

import logging
from typing import IO, Any

MOST = {logging.INFO: 100, logging.WARNING: 20, logging.ERROR: 10}  # records a second of a level


def escape_text(text: str, kept_characters: str = "") -> str:
    """Escapes everything in a text that would not show as a character, except `kept_characters`."""
    if text.isprintable():
        return text
    escaped_parts = [c if c.isprintable() or c in kept_characters else ascii(c)[1:-1] for c in text]
    return "".join(escaped_parts)


class Lines(logging.Formatter):
    """Writes one line a record; those of a traceback follow, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = escape_text(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indent_lines(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indent_lines(super().formatStack(stack_info))


def _indent_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in escape_text(text, "\n").split("\n"))


class Bounded(logging.Filter):
    """Passes a number of records of a level a second; the next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, int] = {}
        self.counts: dict[int, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        record_level, second = record.levelno, int(record.created)
        max_records = MOST.get(record_level, MOST[logging.INFO])
        left_out = 0
        if self.seconds.get(record_level) != second:
            left_out = self.counts.get(record_level, 0) - max_records
            self.seconds[record_level], self.counts[record_level] = second, 0
        self.counts[record_level] += 1
        if left_out > 0:
            record.msg = f"{record.getMessage()} ({left_out} records before it were left out)"
            record.args = ()
        return self.counts[record_level] <= max_records


def begin_logging(stream: IO[str]) -> None:
    """Sends everything that this process logs to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(Bounded())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    for chatty in ("uvicorn", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
