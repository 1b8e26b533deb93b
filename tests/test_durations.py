"""The list of methods whose tests take too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.durations import SECONDS, Durations


def report(path: str, seconds: float) -> Any:
    return SimpleNamespace(nodeid=f"{path}::test_it", duration=seconds)


class Terminal:
    """In place of pytest's reporter."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_the_tests_of_a_method_are_added_up_and_the_slow_ones_are_named() -> None:
    durations = Durations()
    for path, seconds in (
        ("tests/drafters/test_slow.py", 0.5 * SECONDS),
        ("tests/drafters/test_slow.py", 0.7 * SECONDS),
        ("tests/rules/test_slower.py", 2 * SECONDS),
        ("tests/rules/test_quick.py", 0.9 * SECONDS),
        ("tests/api/test_lm.py", 9 * SECONDS),
    ):
        durations.pytest_runtest_logreport(report(path, seconds))
    names = [path for path, _ in durations.slow()]
    assert names == ["tests/rules/test_slower.py", "tests/drafters/test_slow.py"]
    terminal = Terminal()
    durations.pytest_terminal_summary(terminal)
    assert terminal.lines[0] == "methods whose tests take more than 3 s"
    assert terminal.lines[1] == "   6.0 s  tests/rules/test_slower.py"


def test_nothing_is_printed_where_all_are_quick() -> None:
    terminal = Terminal()
    Durations().pytest_terminal_summary(terminal)
    assert terminal.lines == []
