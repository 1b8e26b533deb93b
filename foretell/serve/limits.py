"""Limits of each key, and of how many answers may wait in all."""

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
    """An amount a minute, refilled all the time. What was used beyond it is owed."""

    def __init__(self, per_minute: int, now: float):
        self.per_minute = per_minute
        self.left = float(per_minute)
        self.since = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Returns the seconds until this amount is there; more than a minute's is asked for as a
        minute's.
        """
        gained_amount = (now - self.since) * self.per_minute / MINUTE
        self.left = min(float(self.per_minute), self.left + gained_amount)
        self.since = now
        lacking_amount = min(amount, self.per_minute) - self.left
        return max(0.0, lacking_amount * MINUTE / self.per_minute)

    def use_amount(self, amount: float) -> None:
        self.left -= amount


@dataclass
class Use:
    """The requests and allowances that a key has in use."""

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

    def check_key(self, key: Key | None) -> None:
        """Raises ApiError where this key may not ask now: before its request is read."""
        if self.draining:
            raise retry_error("the server is ending", 1, HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        max_requests = self.running + self.waiting
        if self.requests >= max_requests:
            raise retry_error("too many requests wait; ask again later", self._seconds_for(1))
        key_use = self._use_of_key(key)
        if key is not None and key.concurrent is not None and key_use.running >= key.concurrent:
            raise retry_error(
                f"{key_use.running} requests of this key are in flight, as many as it may have",
                self._seconds_for(1),
            )
        self._check_allowance(key_use.requests, 1, "requests")

    @contextmanager
    def enter_request(self, key: Key | None) -> Iterator[None]:
        """Counts a request of this key while it runs. Raises ApiError where it may not ask now."""
        self.check_key(key)
        key_use = self._use_of_key(key)
        if key_use.requests is not None:
            key_use.requests.use_amount(1)
        key_use.running += 1
        self.requests += 1
        try:
            yield
        finally:
            key_use.running -= 1
            self.requests -= 1

    @contextmanager
    def admit_answers(self, key: Key | None, answers: int, tokens: int) -> Iterator[None]:
        """Counts these answers while they run, to prompts of `tokens` tokens. Raises ApiError where
        too many wait.
        """
        too_many = self.answers + answers - self.running - self.waiting
        if too_many > 0 and self.answers:
            raise retry_error(
                "too many requests wait; ask again later", self._seconds_for(too_many)
            )
        allowance = self._use_of_key(key).tokens
        self._check_allowance(allowance, tokens, "tokens")
        if allowance is not None:
            allowance.use_amount(tokens)
        self.answers += answers
        try:
            yield
        finally:
            self.answers -= answers

    def note_answers(self, key: Key | None, answers: int, tokens: int) -> None:
        """Notes that these answers have ended, with `tokens` tokens together."""
        now = self.clock()
        self._ends.extend([now] * answers)
        allowance = self._use_of_key(key).tokens
        if allowance is not None:
            allowance.use_amount(tokens)

    def _use_of_key(self, key: Key | None) -> Use:
        key_name = "" if key is None else key.name
        is_known = key_name in self._uses
        key_use = self._uses[key_name]
        if key is not None and not is_known:
            now = self.clock()
            if key.requests_per_minute is not None:
                key_use.requests = Allowance(key.requests_per_minute, now)
            if key.tokens_per_minute is not None:
                key_use.tokens = Allowance(key.tokens_per_minute, now)
        return key_use

    def _check_allowance(
        self, allowance: Allowance | None, amount: int, resource_name: str
    ) -> None:
        """Raises ApiError where the allowance does not hold this amount."""
        wait_seconds = 0.0 if allowance is None else allowance.seconds_until(amount, self.clock())
        if wait_seconds > 0:
            raise retry_error(f"this key has used its {resource_name} of this minute", wait_seconds)

    def _seconds_for(self, answers: int) -> float:
        """Estimates the seconds in which these answers end, as quickly as the last ones did."""
        if len(self._ends) < 2:
            return 1.0
        observed_seconds = self.clock() - self._ends[0]
        return answers * observed_seconds / len(self._ends)


def retry_error(
    message: str,
    seconds: float,
    status: int = HTTPStatus.TOO_MANY_REQUESTS,
    code: str = "rate_limit_exceeded",
) -> ApiError:
    """Makes a refusal that says when to ask again."""
    retry_after = str(min(LONGEST, max(1, math.ceil(seconds))))
    return ApiError(message, None, code, status, {"Retry-After": retry_after})
