"""Reads a user's own copy of published tasks: HumanEval's functions, GSM8K's sums.

A file has a JSON object a line, as they are published. A function has `prompt`, its first lines
with what it is to do, `entry_point` and `test`, in which assert statements decide. They are read
and never run, and so are the examples in the prompt, which are public. What cannot be read so is
left out: tests that compute, and functions without examples. A sum has `question` and `answer`,
which ends with `#### 18`; before each stand the two questions before it in the file, worked out.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.bench.programs import Program
from foretell.bench.suites.search.functions import Function
from foretell.bench.suites.search.sums import SHOWN, Sum
from foretell.bench.suites.search.tasks import Task
from foretell.errors import BadConfig, BadFile
from foretell.rewards.cases import Case, case_of

FUNCTION = ("prompt", "entry_point", "test")
SUM = ("question", "answer")
WORKED = re.compile(r"<<[^<>]*>>")  # what GSM8K writes into its answers for calculators


@dataclass(frozen=True)
class Published(Program):
    """A function whose first lines are given as they were published."""

    given: str = ""

    @property
    def begins(self) -> str:
        return self.given

    @property
    def question(self) -> str:
        return f"Complete this Python function:\n\n```python\n{self.given}\n```"

    @property
    def head(self) -> str:
        return self.given


def read(path: str | Path, limit: int = 0) -> list[Task]:
    """The tasks of a file, the first `limit` ones. Raises BadConfig or BadFile."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfig(f"--data {path}: cannot be read ({what})") from error
    rows = list(_rows(text, path))
    if rows and all(set(FUNCTION) <= row.keys() for row in rows):
        found: Sequence[Task] = [task for row in rows if (task := _function(row)) is not None]
    elif rows and all(set(SUM) <= row.keys() for row in rows):
        found = _sums(rows)
    else:
        layouts = f"{', '.join(FUNCTION)}; or {' and '.join(SUM)}"
        raise BadFile(f"--data {path}: its lines are of no layout that is known ({layouts})")
    if len(found) < 2:
        raise BadFile(
            f"--data {path}: of {len(rows)} lines {len(found)} can be used; it takes examples in "
            "the prompt and assert statements with literals, or whole numbers behind ####"
        )
    return list(found[:limit] if limit else found)


def _rows(text: str, path: str | Path) -> Iterator[dict[str, str]]:
    """Raises BadFile, with the number of the line."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise BadFile(f"--data {path}, line {number}: is no JSON object")
        yield {name: value for name, value in row.items() if isinstance(value, str)}


# --- functions


def _function(row: dict[str, str]) -> Function | None:
    """None where its tests or examples cannot be read."""
    name, given = row["entry_point"], row["prompt"].rstrip()
    try:
        public = _examples(given, name)
        hidden = _asserted(row["test"], name)
    except (BadConfig, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not public or not hidden:
        return None
    program = Published(name, "", "", tuple(public), tuple(hidden), given)
    return Function(row.get("task_id", name), program.question, program)


def _examples(prompt: str, name: str) -> list[Case]:
    """What the prompt shows of calls with literals, as `>>> f(1)` with a line `2` or as one of
    `f(1) == 2`, `f(1) = 2`, `f(1) -> 2`, `f(1) => 2` and `f(1) returns 2`.
    """
    shown = [
        (example.source.strip(), example.want.strip().partition("\n")[0])
        for example in doctest.DocTestParser().get_examples(prompt)
    ]
    said = re.compile(rf"({re.escape(name)}\(.*\))\s*(?:==?>?|->|\u279e|(?:should )?returns?)(.+)")
    shown += said.findall(prompt)
    found = []
    for call, value in shown:
        try:
            found.append(case_of(f"assert {call} == {value.strip().rstrip('.')}", name))
        except BadConfig:  # it shows something else
            continue
    return [case for case in found if case.call.name == name]


def _asserted(test: str, name: str) -> list[Case]:
    """All that a test asserts of `candidate` or the function's own name."""
    [check] = [one for one in ast.parse(test).body if isinstance(one, ast.FunctionDef)]
    found = []
    for statement in check.body:
        if isinstance(statement, ast.Assert):
            if isinstance(statement.test, ast.Constant):  # assert True, "..."
                continue
            statement.msg = None
            said = re.sub(r"\bcandidate\(", f"{name}(", ast.unparse(statement))
            found.append(case_of(said, name))
        elif not isinstance(statement, ast.Expr | ast.Pass):
            raise ValueError("it does more than assert")
    return found


# --- sums


def _sums(rows: Sequence[dict[str, str]]) -> list[Sum]:
    found = []
    for place, row in enumerate(rows):
        number = _final(row["answer"])
        shown = [rows[place - back] for back in range(SHOWN, 0, -1)]
        worked = [_worked(one) for one in shown if _final(one["answer"]) is not None]
        if number is not None and len(rows) > SHOWN and len(worked) == SHOWN:
            question = f"{''.join(worked)}Q: {row['question'].strip()}\nA:"
            found.append(Sum("published", question, number))
    return found


def _worked(row: dict[str, str]) -> str:
    steps, _, _ = WORKED.sub("", row["answer"]).rpartition("####")
    said = " ".join(steps.split())
    return f"Q: {row['question'].strip()}\nA: {said} The answer is {_final(row['answer'])}.\n\n"


def _final(answer: str) -> int | None:
    """The whole number behind the last `####`."""
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    return int(number) if mark and re.fullmatch(r"-?\d{1,18}", number) else None
