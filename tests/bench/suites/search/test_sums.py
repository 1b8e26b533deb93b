"""Sums have the answer that they are graded by, and equations are checked."""

from __future__ import annotations

import re

import pytest

from foretell.bench.answer_tasks import last_number
from foretell.bench.suites.search.sums import EQUATION, FORMS, Sum, equation_holds, make_sums
from foretell.bench.suites.search.tasks import make_distinct
from foretell.errors import BadConfig

# Of each kind the answer, by the numbers of its question.
ANSWERS = {
    "added": lambda *numbers: sum(numbers),
    "gained": lambda first, more: first + more,
    "lost": lambda first, fewer: first - fewer,
    "both": lambda first, more, fewer: first + more - fewer,
    "boxes": lambda boxes, each: boxes * each,
    "beside": lambda boxes, each, other: boxes * each + other,
    "older": lambda age, years: age + years,
    "shared": lambda people, things: things / people,
    "change": lambda price, count, paid: paid - price * count,
    "days": lambda pages, days, more: pages * days + more,
}


def _numbers(question: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", question)]


def test_answers_are_those_of_the_questions() -> None:
    tasks = make_sums(300, 1)
    assert len({task.question for task in tasks}) == 300 and tasks == make_sums(
        300, 1
    ) != make_sums(300, 2)
    assert {task.kind for task in tasks} == set(ANSWERS) and len(ANSWERS) == len(FORMS)
    for task in tasks:
        *shown, asked = task.question.split("Q: ")[1:]
        assert asked.endswith("\nA:") and len(shown) == 2
        assert task.answer == ANSWERS[task.kind](*_numbers(asked)) > 0, task.question
        for one in shown:
            question, answer = one.split("\nA:")
            value = ANSWERS[task.kind](*_numbers(question))
            assert last_number(answer) == str(int(value)) and asked != f"{question}\nA:"
            equations = EQUATION.findall(answer)
            assert equations and all(equation_holds(*equation) for equation in equations)
            assert task.public(answer) > 0.5


def test_the_last_number_decides() -> None:
    task = Sum("added", "?", 12)
    assert task.score_answer("5 + 7 = 12") == task.score_answer("It is 3. No: 12.0 apples.") == 1
    assert (
        task.score_answer("12, not 13") == task.score_answer("twelve") == task.score_answer("") == 0
    )


@pytest.mark.parametrize(
    ("terms", "value", "right"),
    [
        ("3 + 4", "7", True),
        ("3+4", "8", False),
        ("3 + 4 * 5", "23", True),
        ("4 x 5 - 2", "18", True),
        ("20 - 6 / 2", "17", True),
        ("1,000 \u00f7 4", "250", True),
        ("10 / 3", "3.33", True),
        ("10 / 3", "3.3", False),
        ("1 / 0", "0", False),
        ("2 - 3 - 4 + 9", "4", True),
    ],
)
def test_equations_hold_or_do_not(terms: str, value: str, right: bool) -> None:
    assert equation_holds(terms, value) is right


def test_what_is_public_are_the_equations_and_not_the_answer() -> None:
    task = Sum("added", "?", 99)
    assert task.public("no equation, 99") == 0.5
    assert task.public("3 + 4 = 7") == pytest.approx(2 / 3)
    assert task.public("$3 + $4 = $7, so 7 * 2 = 14.") == 3 / 4
    assert task.public("3 + 4 = 8 and then 8 + 1 = 9") == 2 / 4
    assert task.public("3 + 4 = 8") == pytest.approx(1 / 3)
    assert task.public("3 + 4 =") == 0.5


def test_more_than_can_be_made_is_refused() -> None:
    with pytest.raises(BadConfig, match="--limit 2: so many different sums cannot be made"):
        make_distinct([lambda draw: Sum("added", "the same", 1)], 2, 0, "sums")
