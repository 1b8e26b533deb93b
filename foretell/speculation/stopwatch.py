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

    def over(self, steps: Generator[Message, Any, R]) -> Generator[Message, Any, R]:
        """The same messages and the same result, with the time taken."""
        answer: Any = None
        error: Exception | None = None
        try:
            while True:
                start = time.perf_counter()
                try:
                    message = steps.throw(error) if error else steps.send(answer)
                except StopIteration as end:
                    result: R = end.value
                    return result
                finally:
                    self.seconds += time.perf_counter() - start
                answer = error = None
                try:
                    answer = yield message
                except Exception as raised:  # of a call, say: the generator may go on
                    error = raised
                self.seconds += sum(reply.seconds for reply in _replies(answer))
        finally:
            steps.close()


def _replies(answer: Any) -> Sequence[Reply]:
    answers = answer if isinstance(answer, list) else [answer]
    return [reply for reply in answers if isinstance(reply, Reply)]
