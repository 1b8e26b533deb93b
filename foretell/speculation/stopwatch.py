"""How long drafting takes, whatever else the engine does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from foretell.core.types import Message, Reply

R = TypeVar("R")


class Stopwatch:
    """Seconds that a generator of messages takes: its own, and its shares of forwards.

    What other requests do while it waits is not counted. What is done `with` it counts, too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self.begun

    def time_messages(self, steps: Generator[Message, Any, R]) -> Generator[Message, Any, R]:
        """Passes on the generator's messages and its result, and takes its time."""
        answer: Any = None
        pending_error: Exception | None = None
        try:
            while True:
                step_start = time.perf_counter()
                try:
                    message = steps.throw(pending_error) if pending_error else steps.send(answer)
                except StopIteration as end:
                    result: R = end.value
                    return result
                finally:
                    self.seconds += time.perf_counter() - step_start
                answer = pending_error = None
                try:
                    answer = yield message
                except Exception as raised:  # of a call, say: the generator may go on
                    pending_error = raised
                self.seconds += sum(reply.seconds for reply in _list_replies(answer))
        finally:
            steps.close()


def _list_replies(answer: Any) -> Sequence[Reply]:
    answers = answer if isinstance(answer, list) else [answer]
    return [reply for reply in answers if isinstance(reply, Reply)]
