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
from foretell.rewards.sandbox import Answer, FunctionCall, Limits, packed, run

CURE = 'write assert f(1) == 2 with literals, or {"call": "f", "args": [1], "expected": 2}'
OPTIONS = {"call", "args", "kwargs", "expected", "tolerance"}


@dataclass(frozen=True)
class Case:
    """A call and what it should give."""

    call: FunctionCall
    expected: Any
    how: str = "equal"  # or "listed": tuples are as good as lists; "true": its truth counts
    tolerance: float = 0.0  # of a number

    def holds(self, answer: Answer) -> bool:
        """Whether that is what the call gave."""
        if answer.fault:
            return False
        try:
            return self._agrees(answer.value)
        except (RecursionError, OverflowError):  # nested too deeply, or a huge number
            return False

    def _agrees(self, value: Any) -> bool:
        if self.how == "true":
            return bool(value) == self.expected
        if self.tolerance:
            number = isinstance(value, int | float)
            return number and abs(value - self.expected) <= self.tolerance
        if self.how == "listed":
            return bool(listed(value) == listed(self.expected))
        return bool(value == self.expected)


@dataclass(frozen=True)
class Cases:
    """The tests of one prompt."""

    name: str
    prompt: str
    tests: tuple[Case, ...]


def verdicts(program: str, tests: Sequence[Case], limits: Limits) -> list[bool]:
    """Whether each test is passed, by one run in the sandbox. Raises Unsupported."""
    answers = run(program, [test.call for test in tests], limits)
    return [test.holds(answer) for test, answer in zip(tests, answers, strict=True)]


def listed(value: Any) -> Any:
    """The same with lists for tuples."""
    if isinstance(value, list | tuple):
        return [listed(one) for one in value]
    if isinstance(value, dict):
        return {key: listed(one) for key, one in value.items()}
    return value


# --- files


def read_cases(path: str | Path) -> tuple[Cases, ...]:
    """Of each line of a file. Raises BadConfig, with the number of the line."""
    try:
        about = Path(path).stat()
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    return _read(str(path), about.st_mtime_ns, about.st_size)


@lru_cache(16)
def _read(path: str, changed: int, size: int) -> tuple[Cases, ...]:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise _unreadable(path, what) from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_cases(line, f"{path}, line {number}"))
    if not found:
        raise _unreadable(path, "it is empty")
    return tuple(found)


def _unreadable(path: str | Path, what: str | None) -> BadConfig:
    return BadConfig(f"{path}: cannot be read as tests ({what}); give a file of JSON lines")


def _cases(line: str, where: str) -> Cases:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    tests = row.get("tests") if isinstance(row, dict) else None
    if not isinstance(tests, list) or not tests:
        raise BadConfig(
            f"{where}: holds no tests; write an object such as "
            '{"prompt": "...", "tests": ["assert f(1) == 2"]}'
        )
    texts = [row.get("name", ""), row.get("prompt", "")]
    if not all(isinstance(text, str) for text in texts):
        raise BadConfig(f"{where}: `name` and `prompt` must be texts")
    made = [case_of(test, f"{where}, test {n}") for n, test in enumerate(tests, 1)]
    return Cases(texts[0], texts[1], tuple(made))


def case_of(test: Any, where: str) -> Case:
    """From a statement or an object. Raises BadConfig, which says `where`."""
    try:
        return _stated(test) if isinstance(test, str) else _given(test)
    except (ValueError, TypeError, SyntaxError, KeyError, RecursionError, MemoryError) as error:
        raise BadConfig(f"{where}: cannot be used as a test ({error}); {CURE}") from None


def _given(test: Any) -> Case:
    if not isinstance(test, dict) or not {"call", "expected"} <= test.keys() <= OPTIONS:
        raise ValueError(f"an object with call, expected and maybe {', '.join(sorted(OPTIONS))}")
    args, named = test.get("args", []), test.get("kwargs", {})
    fits = isinstance(test["call"], str) and isinstance(args, list) and isinstance(named, dict)
    if not fits:
        raise TypeError("call is a name, args a list and kwargs an object")
    _check_name(test["call"])
    tolerance = float(test.get("tolerance", 0))
    if not 0 <= tolerance < 1e300 or (tolerance and not _number(test["expected"])):
        raise ValueError("tolerance is a number, and so is then what is expected")
    call = FunctionCall(test["call"], tuple(args), named)
    return Case(call, test["expected"], "listed", tolerance)


def _stated(text: str) -> Case:
    tree = ast.parse(text.strip())
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        raise ValueError("it is not one assert statement")
    said = tree.body[0].test
    if isinstance(said, ast.UnaryOp) and isinstance(said.op, ast.Not):
        return Case(_call(said.operand), False, "true")
    if not isinstance(said, ast.Compare):
        return Case(_call(said), True, "true")
    if len(said.ops) != 1:
        raise ValueError("it compares more than two values")
    left, how, right = said.left, said.ops[0], said.comparators[0]
    if isinstance(how, ast.Lt | ast.LtE):
        return _near(left, _literal(right))
    if not isinstance(how, ast.Eq | ast.Is):
        raise ValueError("it compares by neither == nor is")
    if not isinstance(left, ast.Call):
        left, right = right, left
    return Case(_call(left), _literal(right))


def _near(left: ast.expr, tolerance: Any) -> Case:
    """Of abs(call - number) < tolerance."""
    inner = left.args[0] if isinstance(left, ast.Call) and len(left.args) == 1 else None
    if (
        not isinstance(left, ast.Call)
        or ast.unparse(left.func) != "abs"
        or not isinstance(inner, ast.BinOp)
        or not isinstance(inner.op, ast.Sub)
    ):
        raise ValueError("what is compared by < is no abs(f(...) - number)")
    expected = _literal(inner.right)
    if not (_number(expected) and _number(tolerance) and 0 < tolerance < 1e300):
        raise ValueError("a number and a tolerance above 0 belong there")
    return Case(_call(inner.left), expected, "equal", float(tolerance))


def _call(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call):
        raise ValueError("it calls no function")
    name = ast.unparse(node.func)
    _check_name(name)
    named = {str(one.arg): _literal(one.value) for one in node.keywords if one.arg}
    if len(named) < len(node.keywords):
        raise ValueError("**arguments are no literals")
    return FunctionCall(name, tuple(_literal(one) for one in node.args), named)


def _check_name(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no function's name")


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
        packed(value)
    except (ValueError, TypeError):
        raise ValueError(f"{ast.unparse(node)} is no literal of plain data") from None
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
