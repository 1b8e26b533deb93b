"""Tests of programs as they are written in files, and what holds of an answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import BadConfig
from foretell.rewards.cases import Case, case_of, judge_program, read_cases
from foretell.rewards.sandbox import Answer, FunctionCall, Limits


def case(test: Any) -> Case:
    return case_of(test, "here")


@pytest.mark.parametrize(
    ("text", "name", "args", "right", "wrong"),
    [
        ("assert add(1, 2) == 3", "add", (1, 2), [3, 3.0], [4, "3", None, [3]]),
        ("assert 3 == add(1, b=-2)", "add", (1,), [3], [2]),
        ("assert f([1, (2, 3)]) == {'a': (1, 2)}", "f", ([1, (2, 3)],), [{"a": (1, 2)}],
         [{"a": [1, 2]}, {"a": (1, 3)}, {}]),
        ("assert f('x') is None", "f", ("x",), [None], [0, ""]),
        ("assert A.f()", "A.f", (), [True, 1, "x"], [False, 0, "", None]),
        ("assert not f()", "f", (), [False, 0, ""], [True, "x"]),
        ("assert abs(f(2) - -1.5) < 1e-3", "f", (2,), [-1.5, -1.4995], [-1.49, 1.5, "x", None]),
    ],
)  # fmt: skip
def test_asserts_are_read(
    text: str, name: str, args: Any, right: list[Any], wrong: list[Any]
) -> None:
    test = case(text)
    assert (test.call.name, test.call.args) == (name, args)
    for value in right:
        assert test.passes(Answer(value)), value
    for value in wrong:
        assert not test.passes(Answer(value)), value
    assert not test.passes(Answer(right[0], "raised"))


def test_objects_are_read() -> None:
    test = case({"call": "f", "args": [[1], 2], "kwargs": {"x": None}, "expected": [[1, 2]]})
    assert test.call == FunctionCall("f", ([1], 2), {"x": None})
    assert test.passes(Answer([[1, 2]])) and test.passes(Answer(((1, 2),)))  # JSON has no tuples
    near = case({"call": "f", "expected": 1, "tolerance": 0.5})
    assert near.passes(Answer(1.4)) and not near.passes(Answer(1.6))


def test_what_is_nested_too_deeply_to_compare_is_not_right() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert not Case(FunctionCall("f"), deep).passes(Answer([deep]))
    assert not Case(FunctionCall("f"), 1.0, tolerance=0.1).passes(Answer(10**400))


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == g(2)", "assert f(x) == 2", "assert 1 == 2", "assert f(1) > 2", "f(1) == 2",
        "assert f(1) == 2 == 3", "assert f(1) == 2; import os", "assert sorted(f(1)) == [1]",
        "assert abs(f(1) + 2) < 1", "assert abs(f(1) - 2) < 0", "assert f(**{'a': 1}) == 1",
        "assert f(*[1]) == 1", "assert (lambda: 1)() == 1", "assert f(1) ==", "assert f(3j) == 1",
        {"call": "f"}, {"call": "f", "expected": 1, "more": 1}, {"call": "a b", "expected": 1},
        {"call": "f", "args": 1, "expected": 1}, {"call": "f", "expected": "x", "tolerance": 1}, 7,
    ],
)  # fmt: skip
def test_what_is_no_test_is_refused_with_its_place(test: Any) -> None:
    with pytest.raises(BadConfig, match=r"^here: cannot be used as a test .*; write assert f"):
        case(test)


def test_a_file_has_them_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    lines = [{"name": "a", "tests": ["assert f() == 1"]}, {"prompt": "b", "tests": ["assert g()"]}]
    path.write_text("\n\n".join(map(json.dumps, lines)), "utf-8")
    first, second = read_cases(path)
    assert (first.name, first.prompt, second.name, second.prompt) == ("a", "", "", "b")
    assert first.tests == (case("assert f() == 1"),)
    path.write_text(json.dumps(lines[0]), "utf-8")
    os.utime(path, (1, 1))
    assert read_cases(path) == (first,)  # it is read again once it has changed
    for text, why in (
        ("", "it is empty"),
        ("{", "line 1: holds no tests"),
        ('\n{"tests": []}', "line 2: holds no tests"),
        ('{"tests": ["assert f()"], "prompt": 3}', "line 1: `name` and `prompt`"),
        ('{"tests": ["assert f()", "x"]}', "line 1, test 2: cannot be used"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(BadConfig, match=why):
            read_cases(path)
    path.write_bytes(b"\xff")
    with pytest.raises(BadConfig, match="not UTF-8"):
        read_cases(path)
    with pytest.raises(BadConfig, match="No such file"):
        read_cases(tmp_path / "none")


def test_a_program_is_held_to_them() -> None:
    tests = [case("assert f(1) == 2"), case("assert f(2) == 5"), case("assert g() == 1")]
    assert judge_program("def f(n): return 2 * n", tests, Limits()) == [True, False, False]
