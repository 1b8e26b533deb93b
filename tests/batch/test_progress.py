"""What is said while a batch runs."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from foretell.batch.progress import EVERY, Meter, line_ticker, show_meter
from foretell.progress import format_duration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_meter_says_speed_failures_and_what_is_left() -> None:
    clock = Clock()
    meter = Meter(10, earlier=5, clock=clock)
    assert meter.seconds_left is None
    assert meter.line() == "5 of 15 done, 0 tokens/s"
    clock.now += 20
    for _ in range(3):
        meter.count(False, tokens=40, prompt_tokens=7)
    meter.count(True)
    assert (meter.done, meter.failed, meter.tokens, meter.prompt_tokens) == (4, 1, 120, 21)
    assert meter.seconds_left == pytest.approx(30)
    assert meter.line() == "9 of 15 done, 6 tokens/s, 1 failed, about 30 s left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5940, "99 min"), (11_100, "3 h 05 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_lines_come_every_half_minute() -> None:
    clock = Clock()
    written: list[str] = []
    tick = line_ticker(Meter(4, clock=clock), written.append)
    for _ in range(3):
        tick()
    assert not written
    clock.now += EVERY
    tick()
    tick()
    assert written == ["0 of 4 done, 0 tokens/s"]


def test_a_terminal_has_a_bar_and_others_have_none() -> None:
    for terminal in (True, False):
        stream = StringIO()
        console = Console(file=stream, force_terminal=terminal, width=80)
        meter = Meter(4, earlier=2)
        with show_meter(meter, console) as tick:
            meter.count(False, 10, 5)
            tick()
        assert ("3/6" in stream.getvalue()) == terminal
        assert terminal or not stream.getvalue()
