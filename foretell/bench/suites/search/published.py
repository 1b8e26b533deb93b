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


def read_published(path: str | Path, limit: int = 0) -> list[Task]:
    """The tasks of a file, the first `limit` ones. Raises BadConfig or BadFile."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfig(f"--data {path}: cannot be read ({cause})") from error
    rows = list(_parse_rows(text, path))
    if rows and all(set(FUNCTION) <= row.keys() for row in rows):
        published_tasks: Sequence[Task] = [
            task for row in rows if (task := _make_function(row)) is not None
        ]
    elif rows and all(set(SUM) <= row.keys() for row in rows):
        published_tasks = _make_sums(rows)
    else:
        layouts = f"{', '.join(FUNCTION)}; or {' and '.join(SUM)}"
        raise BadFile(f"--data {path}: its lines are of no layout that is known ({layouts})")
    if len(published_tasks) < 2:
        raise BadFile(
            f"--data {path}: of {len(rows)} lines {len(published_tasks)} can be used; it takes "
            "examples in the prompt and assert statements with literals, or whole numbers after "
            "####"
        )
    return list(published_tasks[:limit] if limit else published_tasks)


def _parse_rows(text: str, path: str | Path) -> Iterator[dict[str, str]]:
    """Raises BadFile, with the number of the line."""
    for line_number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise BadFile(f"--data {path}, line {line_number}: is no JSON object")
        yield {name: value for name, value in row.items() if isinstance(value, str)}


# --- functions


def _make_function(row: dict[str, str]) -> Function | None:
    """None where its tests or examples cannot be read."""
    function_name, program_start = row["entry_point"], row["prompt"].rstrip()
    try:
        public_cases = _prompt_examples(program_start, function_name)
        hidden_cases = _asserted_cases(row["test"], function_name)
    except (BadConfig, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not public_cases or not hidden_cases:
        return None
    program = Published(
        function_name, "", "", tuple(public_cases), tuple(hidden_cases), program_start
    )
    return Function(row.get("task_id", function_name), program.question, program)


def _prompt_examples(prompt: str, function_name: str) -> list[Case]:
    """Cases of the calls with literals that a prompt shows, as `>>> f(1)` with a line `2` or as
    one of `f(1) == 2`, `f(1) = 2`, `f(1) -> 2`, `f(1) => 2` and `f(1) returns 2`.
    """
    shown_calls = [
        (example.source.strip(), example.want.strip().partition("\n")[0])
        for example in doctest.DocTestParser().get_examples(prompt)
    ]
    call_pattern = re.compile(
        rf"({re.escape(function_name)}\(.*\))\s*(?:==?>?|->|\u279e|(?:should )?returns?)(.+)"
    )
    shown_calls += call_pattern.findall(prompt)
    shown_cases = []
    for call, value in shown_calls:
        try:
            shown_cases.append(
                case_of(f"assert {call} == {value.strip().rstrip('.')}", function_name)
            )
        except BadConfig:  # it shows something else
            continue
    return [case for case in shown_cases if case.call.name == function_name]


def _asserted_cases(test: str, function_name: str) -> list[Case]:
    """All that a test asserts of `candidate` or the function's own name."""
    [check_function] = [
        definition for definition in ast.parse(test).body if isinstance(definition, ast.FunctionDef)
    ]
    asserted_cases = []
    for statement in check_function.body:
        if isinstance(statement, ast.Assert):
            if isinstance(statement.test, ast.Constant):  # assert True, "..."
                continue
            statement.msg = None
            assertion = re.sub(r"\bcandidate\(", f"{function_name}(", ast.unparse(statement))
            asserted_cases.append(case_of(assertion, function_name))
        elif not isinstance(statement, ast.Expr | ast.Pass):
            raise ValueError("it does more than assert")
    return asserted_cases


# --- sums


def _make_sums(rows: Sequence[dict[str, str]]) -> list[Sum]:
    sum_tasks = []
    for row_index, row in enumerate(rows):
        final_number = _final_number(row["answer"])
        shown_rows = [rows[row_index - distance] for distance in range(SHOWN, 0, -1)]
        worked_examples = [
            _format_worked(shown_row)
            for shown_row in shown_rows
            if _final_number(shown_row["answer"]) is not None
        ]
        if final_number is not None and len(rows) > SHOWN and len(worked_examples) == SHOWN:
            question = f"{''.join(worked_examples)}Q: {row['question'].strip()}\nA:"
            sum_tasks.append(Sum("published", question, final_number))
    return sum_tasks


def _format_worked(row: dict[str, str]) -> str:
    steps, _, _ = WORKED.sub("", row["answer"]).rpartition("####")
    steps_text = " ".join(steps.split())
    answer = _final_number(row["answer"])
    return f"Q: {row['question'].strip()}\nA: {steps_text} The answer is {answer}.\n\n"


def _final_number(answer: str) -> int | None:
    """The whole number after the last `####`."""
    _, separator, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    return int(number) if separator and re.fullmatch(r"-?\d{1,18}", number) else None
