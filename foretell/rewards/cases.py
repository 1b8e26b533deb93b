"""Tests of programs: calls of their functions, each with what it should give.

A file has a JSON object a line: `tests`, and maybe the `prompt` that it is about and a `name`. A
test is an object, {"call": "add", "args": [1, 2], "expected": 3}, or an assert statement of one of
these forms, which is read and never run, with literals for all but the call:

    assert add(1, 2) == 3          assert is_even(4)
    assert add(1, 2) is None       assert not is_even(3)
    assert abs(half(3) - 1.5) < 1e-6

So the program under test learns the call alone, and its value is compared where it has no access.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig
from foretell.rewards.sandbox import Answer, FunctionCall, Limits, pack_value, run_program

CURE = 'write assert f(1) == 2 with literals, or {"call": "f", "args": [1], "expected": 2}'
OPTIONS = {"call", "args", "kwargs", "expected", "tolerance"}


@dataclass(frozen=True)
class Case:
    """A call and what it should give."""

    call: FunctionCall
    expected: Any
    comparison: str = "equal"  # or "listed": tuples are as good as lists; "true": its truth counts
    tolerance: float = 0.0  # of a number

    def passes(self, answer: Answer) -> bool:
        """Whether the answer is what the call should give."""
        if answer.fault:
            return False
        try:
            return self._value_agrees(answer.value)
        except (RecursionError, OverflowError):  # nested too deeply, or a huge number
            return False

    def _value_agrees(self, value: Any) -> bool:
        if self.comparison == "true":
            return bool(value) == self.expected
        if self.tolerance:
            is_number = isinstance(value, int | float)
            return is_number and abs(value - self.expected) <= self.tolerance
        if self.comparison == "listed":
            return bool(as_lists(value) == as_lists(self.expected))
        return bool(value == self.expected)


@dataclass(frozen=True)
class Cases:
    """The tests of one prompt."""

    name: str
    prompt: str
    tests: tuple[Case, ...]


def judge_program(program: str, tests: Sequence[Case], limits: Limits) -> list[bool]:
    """Runs a program in the sandbox; returns whether each test is passed. Raises Unsupported."""
    program_answers = run_program(program, [test.call for test in tests], limits)
    return [test.passes(answer) for test, answer in zip(tests, program_answers, strict=True)]


def as_lists(value: Any) -> Any:
    """Returns the value with lists for tuples, at every depth."""
    if isinstance(value, list | tuple):
        return [as_lists(element) for element in value]
    if isinstance(value, dict):
        return {key: as_lists(element) for key, element in value.items()}
    return value


# --- files


def read_cases(path: str | Path) -> tuple[Cases, ...]:
    """Reads the tests of each line of a file. Raises BadConfig, with the number of the line."""
    try:
        file_stat = Path(path).stat()
    except OSError as error:
        raise _unreadable_error(path, error.strerror) from error
    return _read_file(str(path), file_stat.st_mtime_ns, file_stat.st_size)


@lru_cache(16)
def _read_file(path: str, changed_at: int, size: int) -> tuple[Cases, ...]:
    try:
        file_text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise _unreadable_error(path, reason) from error
    cases = []
    for number, line in enumerate(file_text.split("\n"), 1):
        if line.strip():
            cases.append(_parse_cases(line, f"{path}, line {number}"))
    if not cases:
        raise _unreadable_error(path, "it is empty")
    return tuple(cases)


def _unreadable_error(path: str | Path, reason: str | None) -> BadConfig:
    return BadConfig(f"{path}: cannot be read as tests ({reason}); give a file of JSON lines")


def _parse_cases(line: str, location: str) -> Cases:
    try:
        parsed_line = json.loads(line)
    except (ValueError, RecursionError):
        parsed_line = None
    tests = parsed_line.get("tests") if isinstance(parsed_line, dict) else None
    if not isinstance(tests, list) or not tests:
        raise BadConfig(
            f"{location}: holds no tests; write an object such as "
            '{"prompt": "...", "tests": ["assert f(1) == 2"]}'
        )
    name_and_prompt = [parsed_line.get("name", ""), parsed_line.get("prompt", "")]
    if not all(isinstance(text, str) for text in name_and_prompt):
        raise BadConfig(f"{location}: `name` and `prompt` must be texts")
    test_cases = [
        case_of(test, f"{location}, test {test_number}")
        for test_number, test in enumerate(tests, 1)
    ]
    return Cases(name_and_prompt[0], name_and_prompt[1], tuple(test_cases))


def case_of(test: Any, location: str) -> Case:
    """Reads a test from a statement or an object. Raises BadConfig, which names the `location`."""
    try:
        return _case_of_assert(test) if isinstance(test, str) else _case_of_object(test)
    except (ValueError, TypeError, SyntaxError, KeyError, RecursionError, MemoryError) as error:
        raise BadConfig(f"{location}: cannot be used as a test ({error}); {CURE}") from None


def _case_of_object(test: Any) -> Case:
    if not isinstance(test, dict) or not {"call", "expected"} <= test.keys() <= OPTIONS:
        raise ValueError(f"an object with call, expected and maybe {', '.join(sorted(OPTIONS))}")
    call_args, keyword_args = test.get("args", []), test.get("kwargs", {})
    has_right_types = (
        isinstance(test["call"], str)
        and isinstance(call_args, list)
        and isinstance(keyword_args, dict)
    )
    if not has_right_types:
        raise TypeError("call is a name, args a list and kwargs an object")
    _check_name(test["call"])
    tolerance = float(test.get("tolerance", 0))
    if not 0 <= tolerance < 1e300 or (tolerance and not _is_number(test["expected"])):
        raise ValueError("tolerance is a number, and so is then what is expected")
    call = FunctionCall(test["call"], tuple(call_args), keyword_args)
    return Case(call, test["expected"], "listed", tolerance)


def _case_of_assert(text: str) -> Case:
    parsed_tree = ast.parse(text.strip())
    if len(parsed_tree.body) != 1 or not isinstance(parsed_tree.body[0], ast.Assert):
        raise ValueError("it is not one assert statement")
    asserted = parsed_tree.body[0].test
    if isinstance(asserted, ast.UnaryOp) and isinstance(asserted.op, ast.Not):
        return Case(_read_call(asserted.operand), False, "true")
    if not isinstance(asserted, ast.Compare):
        return Case(_read_call(asserted), True, "true")
    if len(asserted.ops) != 1:
        raise ValueError("it compares more than two values")
    left_side, operator, right_side = asserted.left, asserted.ops[0], asserted.comparators[0]
    if isinstance(operator, ast.Lt | ast.LtE):
        return _case_of_tolerance(left_side, _read_literal(right_side))
    if not isinstance(operator, ast.Eq | ast.Is):
        raise ValueError("it compares by neither == nor is")
    if not isinstance(left_side, ast.Call):
        left_side, right_side = right_side, left_side
    return Case(_read_call(left_side), _read_literal(right_side))


def _case_of_tolerance(absolute_call: ast.expr, tolerance: Any) -> Case:
    """Reads a test of the form abs(call - number) < tolerance."""
    difference = (
        absolute_call.args[0]
        if isinstance(absolute_call, ast.Call) and len(absolute_call.args) == 1
        else None
    )
    if (
        not isinstance(absolute_call, ast.Call)
        or ast.unparse(absolute_call.func) != "abs"
        or not isinstance(difference, ast.BinOp)
        or not isinstance(difference.op, ast.Sub)
    ):
        raise ValueError("what is compared by < is no abs(f(...) - number)")
    expected = _read_literal(difference.right)
    if not (_is_number(expected) and _is_number(tolerance) and 0 < tolerance < 1e300):
        raise ValueError("a number and a tolerance above 0 belong there")
    return Case(_read_call(difference.left), expected, "equal", float(tolerance))


def _read_call(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call):
        raise ValueError("it calls no function")
    function_name = ast.unparse(node.func)
    _check_name(function_name)
    keyword_args = {
        str(keyword.arg): _read_literal(keyword.value) for keyword in node.keywords if keyword.arg
    }
    if len(keyword_args) < len(node.keywords):
        raise ValueError("**arguments are no literals")
    return FunctionCall(
        function_name, tuple(_read_literal(keyword) for keyword in node.args), keyword_args
    )


def _check_name(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no function's name")


def _read_literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
        pack_value(value)
    except (ValueError, TypeError):
        raise ValueError(f"{ast.unparse(node)} is no literal of plain data") from None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
