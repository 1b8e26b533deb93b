"""Who may ask now: limits of each key, and how many answers may wait in all."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from foretell.serve.errors import ApiError
from foretell.serve.keys import Key

MINUTE = 60.0
REMEMBERED = 64  # answers whose ends tell the rate
LONGEST = 120  # seconds that a client is told to wait


class Allowance:
    """So much a minute, refilled all the time. What was used beyond it is owed."""

    def __init__(self, per_minute: int, now: float):
        self.per_minute = per_minute
        self.left = float(per_minute)
        self.since = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Until so much is there; more than a minute's is asked for as a minute's."""
        gained = (now - self.since) * self.per_minute / MINUTE
        self.left = min(float(self.per_minute), self.left + gained)
        self.since = now
        lacking = min(amount, self.per_minute) - self.left
        return max(0.0, lacking * MINUTE / self.per_minute)

    def use(self, amount: float) -> None:
        self.left -= amount


@dataclass
class Use:
    """What a key has in use."""

    running: int = 0  # requests
    requests: Allowance | None = None
    tokens: Allowance | None = None


class Gate:
    """Counts what is in flight and refuses what is too much. Used by the event loop alone."""

    def __init__(self, running: int, waiting: int, clock: Callable[[], float] = time.monotonic):
        self.running = running
        self.waiting = waiting
        self.clock = clock
        self.requests = 0  # in flight
        self.answers = 0  # in flight: a request has n for each of its prompts
        self.draining = False
        self._uses: dict[str, Use] = defaultdict(Use)
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def check(self, key: Key | None) -> None:
        """Raises ApiError where this key may not ask now: before its request is read."""
        if self.draining:
            raise refused("the server is ending", 1, HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        most = self.running + self.waiting
        if self.requests >= most:
            raise refused("too many requests wait; ask again later", self._seconds_for(1))
        use = self._use(key)
        if key is not None and key.concurrent is not None and use.running >= key.concurrent:
            raise refused(
                f"{use.running} requests of this key are in flight, as many as it may have",
                self._seconds_for(1),
            )
        self._wait(use.requests, 1, "requests")

    @contextmanager
    def request(self, key: Key | None) -> Iterator[None]:
        """A request of this key. Raises ApiError where it may not ask now."""
        self.check(key)
        use = self._use(key)
        if use.requests is not None:
            use.requests.use(1)
        use.running += 1
        self.requests += 1
        try:
            yield
        finally:
            use.running -= 1
            self.requests -= 1

    @contextmanager
    def admitted(self, key: Key | None, answers: int, tokens: int) -> Iterator[None]:
        """So many answers to prompts of so many tokens. Raises ApiError where too many wait."""
        too_many = self.answers + answers - self.running - self.waiting
        if too_many > 0 and self.answers:
            raise refused("too many requests wait; ask again later", self._seconds_for(too_many))
        allowance = self._use(key).tokens
        self._wait(allowance, tokens, "tokens")
        if allowance is not None:
            allowance.use(tokens)
        self.answers += answers
        try:
            yield
        finally:
            self.answers -= answers

    def answered(self, key: Key | None, answers: int, tokens: int) -> None:
        """So many answers have ended, with so many tokens together."""
        now = self.clock()
        self._ends.extend([now] * answers)
        allowance = self._use(key).tokens
        if allowance is not None:
            allowance.use(tokens)

    def _use(self, key: Key | None) -> Use:
        name = "" if key is None else key.name
        known = name in self._uses
        use = self._uses[name]
        if key is not None and not known:
            now = self.clock()
            if key.requests_per_minute is not None:
                use.requests = Allowance(key.requests_per_minute, now)
            if key.tokens_per_minute is not None:
                use.tokens = Allowance(key.tokens_per_minute, now)
        return use

    def _wait(self, allowance: Allowance | None, amount: int, what: str) -> None:
        """Raises ApiError where so much is not there."""
        seconds = 0.0 if allowance is None else allowance.seconds_until(amount, self.clock())
        if seconds > 0:
            raise refused(f"this key has used its {what} of this minute", seconds)

    def _seconds_for(self, answers: int) -> float:
        """In which so many answers end, as quickly as the last ones did."""
        if len(self._ends) < 2:
            return 1.0
        span = self.clock() - self._ends[0]
        return answers * span / len(self._ends)


def refused(
    message: str,
    seconds: float,
    status: int = HTTPStatus.TOO_MANY_REQUESTS,
    code: str = "rate_limit_exceeded",
) -> ApiError:
    """A refusal that says when to ask again."""
    wait = str(min(LONGEST, max(1, math.ceil(seconds))))
    return ApiError(message, None, code, status, {"Retry-After": wait})
