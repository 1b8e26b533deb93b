"""Tasks of the sorts `functions` and `programs`: a function is to be written that passes tests.

Public tests stand in the question as examples, hidden ones decide. Of `functions` the first line is
given and the answer goes on with the body; an answer to `programs` is free, and its code is what
stands in its fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from foretell.bench.programs import STOPS, Program
from foretell.bench.programs import programs as made
from foretell.bench.suites.search.tasks import Task
from foretell.rewards.cases import Cases, verdicts
from foretell.rewards.sandbox import Limits
from foretell.rewards.tests import program_of

LIMITS = Limits(seconds=5.0, cpu=5)


@dataclass(frozen=True, eq=False)
class Function(Task):
    """A program's body is to be written behind its first line."""

    program: Program
    known: dict[str, list[bool]] = field(default_factory=dict)  # verdicts of programs that were run

    sort: ClassVar[str] = "functions"
    partial: ClassVar[bool] = False
    stop: ClassVar[tuple[str, ...]] = STOPS

    @property
    def opening(self) -> str:
        """It does not end with a line's end: with the blanks behind it that is often one token."""
        return f"```python\n{self.program.begins}"

    @property
    def head(self) -> str:
        return self.program.head

    def before(self, opening: str) -> str:
        return opening.removeprefix("```python\n")

    def code(self, text: str) -> str:
        """The program that an answer is."""
        return text

    def passed(self, text: str) -> list[bool]:
        """Of the public tests and then of the hidden ones; each program is run once."""
        code = self.code(text)
        if code not in self.known:
            tests = [*self.program.public, *self.program.hidden]
            self.known[code] = verdicts(code, tests, LIMITS)
        return self.known[code]

    def public(self, text: str) -> float:
        """The share of public tests that are passed."""
        return _share(self.passed(text)[: len(self.program.public)])

    def score(self, text: str) -> float:
        """The share of hidden tests that are passed."""
        return _share(self.passed(text)[len(self.program.public) :])


@dataclass(frozen=True, eq=False)
class FreeProgram(Function):
    """The same without the first line."""

    sort: ClassVar[str] = "programs"
    stop: ClassVar[tuple[str, ...]] = ()

    @property
    def opening(self) -> str:
        return ""

    def before(self, opening: str) -> str:
        """For a model that continues texts the prompt is the program's beginning."""
        return opening

    def code(self, text: str) -> str:
        return program_of(text, "", Cases("", "", self.program.public))


def _share(passed: list[bool]) -> float:
    return sum(passed) / len(passed)


def functions(count: int, seed: int) -> list[Function]:
    """Raises BadConfig where there are fewer."""
    return [Function(one.kind, one.question, one) for one in made(count, seed)]


def programs(count: int, seed: int) -> list[FreeProgram]:
    """The same tasks with free answers. Raises BadConfig where there are fewer."""
    return [FreeProgram(one.kind, one.question, one) for one in made(count, seed)]
