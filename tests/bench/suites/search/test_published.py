"""Published tasks: what is read of a file, what is left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.settings import Settings
from foretell.bench.suites.search import prepare
from foretell.bench.suites.search.published import read_published
from foretell.errors import BadConfig, BadFile

PROMPT = '''from typing import List


def least(numbers: List[int], start: int = 0) -> int:
    """The lowest number from a place on.
    >>> least([3, 1, 2])
    1
    least([5, 4], 1) == 4
    least([]) raises an error
    """
'''
TEST = """METADATA = {}


def check(candidate):
    assert candidate([3, 1, 2]) == 1, "the second"
    assert candidate([7]) == 7
    assert True, "nothing"
"""
RIGHT = "\n    return min(numbers[start:])"


def function(**changed: str) -> dict[str, str]:
    return {"task_id": "T/1", "prompt": PROMPT, "entry_point": "least", "test": TEST} | changed


def story(number: int, answer: str | None = None) -> dict[str, str]:
    steps = f"It is {number}+1=<<{number}+1={number + 1}>>{number + 1}.\n#### {number + 1}"
    return {"question": f"What comes after {number}?", "answer": answer or steps}


def written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "tasks.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def taken(path: Path) -> Any:
    return read_published(path)


def test_a_function_has_its_examples_and_what_the_test_asserts(tmp_path: Path) -> None:
    first, second = taken(written(tmp_path, [function(), function(task_id="T/2")]))
    assert (first.kind, second.kind) == ("T/1", "T/2") and first.sort == "functions"
    program = first.program
    assert [(case.call.args, case.expected) for case in program.public] == [
        (([3, 1, 2],), 1),
        (([5, 4], 1), 4),
    ]
    assert [(case.call.args, case.expected) for case in program.hidden] == [
        (([3, 1, 2],), 1),
        (([7],), 7),
    ]
    begin = first.answer_prefix(first.opening)
    assert first.opening == f"```python\n{PROMPT.rstrip()}" and begin == PROMPT.rstrip()
    assert first.score_answer(begin + RIGHT) == first.public(begin + RIGHT) == 1
    wrong = begin + "\n    return numbers[0]"
    assert (first.score_answer(wrong), first.public(wrong)) == (0.5, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"test": "def check(candidate):\n    for n in range(3):\n        assert candidate([n])"},
        {"test": "def check(candidate):\n    assert candidate([1]) == 2 / 3"},
        {"test": "x = 1"},
        {"test": "def check(:"},
        {"prompt": 'def least(numbers):\n    """The lowest."""\n'},
        {"prompt": 'def least(numbers):\n    """\n    least(numbers) == 3\n    """\n'},
    ],
)
def test_what_cannot_be_read_is_left_out(tmp_path: Path, changed: dict[str, str]) -> None:
    rows = [function(), function(**changed), function(task_id="T/3")]
    assert [task.kind for task in read_published(written(tmp_path, rows))] == ["T/1", "T/3"]


def test_a_sum_stands_behind_the_two_before_it(tmp_path: Path) -> None:
    rows = [story(number) for number in range(4)]
    tasks = taken(written(tmp_path, rows))
    assert [task.answer for task in tasks] == [1, 2, 3, 4]
    assert tasks[2].question == (
        "Q: What comes after 0?\nA: It is 0+1=1. The answer is 1.\n\n"
        "Q: What comes after 1?\nA: It is 1+1=2. The answer is 2.\n\n"
        "Q: What comes after 2?\nA:"
    )
    assert "after 2?" in tasks[0].question and "after 3?" in tasks[0].question  # of the end
    assert tasks[2].score_answer("It is 2 + 1 = 3. The answer is 3.") == 1
    half = [*rows, story(9, "a half\n#### 0.5"), story(5)]
    answers = [task.answer for task in taken(written(tmp_path, half))]
    assert answers == [2, 3, 4]  # neither the half nor those that it would stand before
    assert (
        read_published(written(tmp_path, [*rows, story(1000, "much\n#### 1,001")]))[-1].kind
        == "published"
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "layout"),
        (["no JSON"], "line 1: is no JSON object"),
        ([function(), "[1]"], "line 2"),
        ([{"question": "?"}], "layout"),
        ([function(test="x"), function()], "of 2 lines 1 can be used"),
        ([story(1), story(2)], "of 2 lines 0 can be used"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(BadFile, match=said):
        read_published(written(tmp_path, rows))


def test_a_file_that_is_not_there_and_tasks_beside_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot be read"):
        read_published(tmp_path / "none.jsonl")
    path = written(tmp_path, [function(), function(task_id="T/2"), function(task_id="T/3")])
    with pytest.raises(BadConfig, match="--tasks"):
        prepare([path], Settings(tasks=("sums",)), 0)
    assert len(prepare([path], Settings(), 2)) == 2
