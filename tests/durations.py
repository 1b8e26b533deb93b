"""How long the tests of each method take, which is to be SECONDS at most.

A run says at its end which methods take longer. It never fails for it: machines differ.
"""

from __future__ import annotations

from typing import Any

SECONDS = 3.0  # of all tests in one method's file
KINDS = (
    "drafters",
    "strategies",
    "rules",
    "rows",
    "processor",
    "rewards",
    "constraints",
    "diffusion",
    "kv",
)
FOLDERS = tuple(f"tests/{name}/" for name in KINDS)


class Durations:
    """A plugin of pytest. Under xdist the reports of all workers arrive at the one that prints."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # by file, set-up and tear-down included

    def pytest_runtest_logreport(self, report: Any) -> None:
        path = report.nodeid.partition("::")[0]
        if path.startswith(FOLDERS):
            self.seconds[path] = self.seconds.get(path, 0.0) + report.duration

    def slow(self) -> list[tuple[str, float]]:
        """Files that took longer than SECONDS, the slowest first."""
        over = [(path, seconds) for path, seconds in self.seconds.items() if seconds > SECONDS]
        return sorted(over, key=lambda pair: -pair[1])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        slow = self.slow()
        if not slow:
            return
        terminalreporter.section(f"methods whose tests take more than {SECONDS:g} s")
        for path, seconds in slow:
            terminalreporter.write_line(f"{seconds:6.1f} s  {path}")
