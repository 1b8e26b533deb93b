"""Tasks are different, come again for a seed, and have solutions."""

from __future__ import annotations

import re

import pytest

from foretell.bench.programs import HIDDEN, KINDS, PUBLIC, make_programs
from foretell.errors import BadConfig
from foretell.rewards.cases import judge_program
from foretell.rewards.sandbox import Limits

# Of each kind a body; 0, 1 stand for the first and second number or word of what is wanted.
BODIES = {
    "linear": "return {0} * x - {1}",
    "limited": "return max({0}, min({1}, x))",
    "power_remainder": "return pow(x, {0}, {1})",
    "digit_sum": "return {0} * sum(int(digit) for digit in str(n))",
    "count_above": "return len([x for x in numbers if x > {0}])",
    "sum_of_multiples": "return sum(x for x in numbers if x % {0} == 0)",
    "every_other": "return numbers[::{0}]",
    "nth_largest": "return sorted(numbers, reverse=True)[{0} - 1]",
    "rotated": "return (numbers * 2)[{0} : {0} + len(numbers)]",
    "scaled": "return [{0} * x + {1} for x in numbers]",
    "replaced": "return {1}.join(text.split({0}))",
    "count_letters": "return len([letter for letter in text if letter in {0}])",
    "repeated": "return ((text + {1}) * {0})[:-1]",
    "long_words": "return list(filter(lambda word: len(word) >= {0} + 1, words))",
    "initials": "return ''.join(word.upper()[:{0}] for word in words)",
}
NUMBER = re.compile(r"\d+|'[^']+'|\bsecond\b|\bthird\b")


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_says_what_its_tests_hold_it_to(kind: str) -> None:
    (task,) = [one for one in make_programs(len(KINDS), 3) if one.kind == kind]
    words = {"second": "2", "third": "3"}
    found = [words.get(word, word) for word in NUMBER.findall(task.says)]
    good = f"{task.begins}\n    {BODIES[kind].format(*found)}\n"
    tests = [*task.public, *task.hidden]
    assert all(judge_program(good, tests, Limits())), good
    assert len({test.call.args.__repr__() for test in tests}) == PUBLIC + HIDDEN
    for call, value in task.examples:
        assert f"{call} == {value}" in task.question and f">>> {call}\n    {value}" in task.head
    assert task.says in task.question and task.says in task.head
    compile(task.head + "\n    pass", "", "exec")


def test_tasks_are_different_and_come_again() -> None:
    tasks = make_programs(90, 1)
    assert tasks == make_programs(90, 1) != make_programs(90, 2)
    assert len({(task.kind, task.says) for task in tasks}) == 90
    assert len({task.kind for task in tasks}) == len(KINDS) >= 10
    with pytest.raises(BadConfig, match="different tasks cannot be made"):
        make_programs(1000, 0)
