"""Tasks of the sorts `functions` and `programs`: a function is to be written that passes tests.

Public tests stand in the question as examples, hidden ones decide. Of `functions` the first line is
given and the answer goes on with the body; an answer to `programs` is free, and its code is what
stands in its fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from foretell.bench.programs import STOPS, Program
from foretell.bench.programs import make_programs as made
from foretell.bench.suites.search.tasks import Task
from foretell.rewards.cases import Cases, judge_program
from foretell.rewards.sandbox import Limits
from foretell.rewards.tests import program_of

LIMITS = Limits(seconds=5.0, cpu=5)


@dataclass(frozen=True, eq=False)
class Function(Task):
    """A program's body is to be written after its first line."""

    program: Program
    known_verdicts: dict[str, list[bool]] = field(
        default_factory=dict
    )  # verdicts of programs that were run

    sort: ClassVar[str] = "functions"
    partial: ClassVar[bool] = False
    stop: ClassVar[tuple[str, ...]] = STOPS

    @property
    def opening(self) -> str:
        """Opening without a line's end: with the blanks after it that is often one token."""
        return f"```python\n{self.program.begins}"

    @property
    def head(self) -> str:
        return self.program.head

    def answer_prefix(self, opening: str) -> str:
        return opening.removeprefix("```python\n")

    def code(self, text: str) -> str:
        """The program that an answer is."""
        return text

    def test_results(self, text: str) -> list[bool]:
        """Results of the public tests and then of the hidden ones; each program is run once."""
        code = self.code(text)
        if code not in self.known_verdicts:
            tests = [*self.program.public, *self.program.hidden]
            self.known_verdicts[code] = judge_program(code, tests, LIMITS)
        return self.known_verdicts[code]

    def public(self, text: str) -> float:
        """The share of public tests that are passed."""
        return _passed_share(self.test_results(text)[: len(self.program.public)])

    def score_answer(self, text: str) -> float:
        """The share of hidden tests that are passed."""
        return _passed_share(self.test_results(text)[len(self.program.public) :])


@dataclass(frozen=True, eq=False)
class FreeProgram(Function):
    """A whole program is to be written: no first line is given."""

    sort: ClassVar[str] = "programs"
    stop: ClassVar[tuple[str, ...]] = ()

    @property
    def opening(self) -> str:
        return ""

    def answer_prefix(self, opening: str) -> str:
        """For a model that continues texts the prompt is the program's beginning."""
        return opening

    def code(self, text: str) -> str:
        return program_of(text, "", Cases("", "", self.program.public))


def _passed_share(test_results: list[bool]) -> float:
    return sum(test_results) / len(test_results)


def make_functions(count: int, seed: int) -> list[Function]:
    """Makes `count` different functions. Raises BadConfig where there are fewer."""
    return [Function(program.kind, program.question, program) for program in made(count, seed)]


def make_free_programs(count: int, seed: int) -> list[FreeProgram]:
    """Makes the tasks of `functions` with free answers. Raises BadConfig where there are fewer."""
    return [FreeProgram(program.kind, program.question, program) for program in made(count, seed)]
