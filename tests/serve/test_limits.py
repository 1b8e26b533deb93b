"""Who may ask now, by a clock that tests turn."""

from __future__ import annotations

import pytest

from foretell.serve import service
from foretell.serve.errors import ApiError
from foretell.serve.keys import Key
from foretell.serve.limits import Gate
from foretell.serve.service import rows_memory
from foretell.serve.settings import MEGABYTE, Settings
from tests import tiny


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(running: int = 2, waiting: int = 3) -> tuple[Gate, Clock]:
    clock = Clock()
    return Gate(running, waiting, clock), clock


def key(**limits: int) -> Key:
    return Key("one", b"", **limits)


def test_so_many_requests_a_minute() -> None:
    door, clock = gate()
    one = key(requests_per_minute=2)
    for _ in range(2):
        with door.enter_request(one):
            pass
    with pytest.raises(ApiError) as refusal, door.enter_request(one):
        pass
    assert refusal.value.status == 429 and refusal.value.headers["Retry-After"] == "30"
    clock.now += 30
    with door.enter_request(one):
        pass
    with door.enter_request(None), door.enter_request(Key("two", b"")):
        pass  # others are free


def test_so_many_tokens_a_minute() -> None:
    door, clock = gate()
    one = key(tokens_per_minute=100)
    with door.admit_answers(one, 1, 60):
        door.note_answers(one, 1, 100)  # what an answer takes beyond it is owed
    with pytest.raises(ApiError) as refusal, door.admit_answers(one, 1, 10):
        pass
    assert refusal.value.headers["Retry-After"] == "42"
    clock.now += 42
    with door.admit_answers(one, 1, 10):
        pass


def test_a_prompt_of_more_than_a_minutes_tokens_waits_for_a_whole_minute() -> None:
    door, clock = gate()
    one = key(tokens_per_minute=100)
    with door.admit_answers(one, 1, 500):
        pass
    with pytest.raises(ApiError), door.admit_answers(one, 1, 500):
        pass
    clock.now += 300
    with door.admit_answers(one, 1, 500):
        pass


def test_so_many_requests_at_once() -> None:
    door, _ = gate()
    one = key(concurrent=1)
    with door.enter_request(one):
        with pytest.raises(ApiError, match="as many as it may have"), door.enter_request(one):
            pass
        with door.enter_request(None):
            pass
    with door.enter_request(one):
        pass
    assert door.requests == 0


def test_so_many_may_wait() -> None:
    door, clock = gate(running=2, waiting=3)
    for _ in range(3):
        clock.now += 2
        door.note_answers(None, 1, 10)
    with door.admit_answers(None, 4, 1):
        with door.admit_answers(None, 1, 1):
            with pytest.raises(ApiError) as refusal, door.admit_answers(None, 2, 1):
                pass
            # Two too many; three answers ended in the four seconds since the first of them.
            assert refusal.value.headers["Retry-After"] == "3"
        with door.admit_answers(None, 1, 1):
            pass
    with door.admit_answers(None, 10, 1):
        pass  # alone, one request may be as large as it likes
    assert door.answers == 0


def test_a_server_that_ends_admits_nobody() -> None:
    door, _ = gate()
    door.draining = True
    with pytest.raises(ApiError) as refusal, door.enter_request(None):
        pass
    assert refusal.value.status == 503 and refusal.value.code == "draining"


def test_rows_may_take_most_of_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm()
    left: list[int | None] = [10_000 * MEGABYTE]
    monkeypatch.setattr(service, "spare_bytes", lambda device: left[0])
    assert rows_memory(lm, Settings(prefixes=MEGABYTE)) == 8_000 * MEGABYTE - MEGABYTE
    assert rows_memory(lm, Settings(memory=7)) == 7
    assert rows_memory(lm, Settings(budget=7)) is None, "it bounds rows as well"
    left[0] = 0
    assert rows_memory(lm, Settings()) == service.LEAST_ROWS, "it starts, and says what is lacking"
    left[0] = None
    assert rows_memory(lm, Settings()) is None
