"""Lists: entries are read, and only different right ones count."""

from __future__ import annotations

import re

from foretell.bench.suites.search.lists import FORMS, SETS, Listing, make_lists, plain_entries


def test_entries_are_read_whatever_is_said_of_them() -> None:
    text = (
        "1. Germany\n2) The **Netherlands** - a flat one\n- Czech Republic (Prague)\n"
        "* Spain: warm\nNot an entry\n4. San  Marino.\n5.\n6. Guinea-Bissau, really"
    )
    assert plain_entries(text) == [
        "germany",
        "netherlands",
        "czech republic",
        "spain",
        "san marino",
        "",
        "guinea-bissau really",
    ]


def test_first_entries_count_once_each() -> None:
    task = Listing("named", "?", 3, frozenset({"a", "b", "c", "d"}))
    assert task.score_answer("1. a\n2. B\n3. c\n4. x") == task.public("1. x\n2. y\n3. z") == 1
    assert task.score_answer("1. a\n2. a\n3. b\n4. c") == 2 / 3
    assert task.score_answer("1. x\n2. a\n3. b\n4. c") == 2 / 3
    assert task.score_answer("a b c") == 0
    assert task.public("1. x\n2. x\n3.") == 1 / 3
    assert task.count_correct(["1. x\n2. a\n3. A\n4. b\n5. d"]) == 3


def test_tasks_are_different_and_have_enough_right_entries() -> None:
    tasks = make_lists(300, 2)
    assert len({task.question for task in tasks}) == 300 and tasks == make_lists(300, 2)
    assert len({task.kind for task in tasks}) == len(FORMS)
    for task in tasks:
        assert len(task.right_entries) >= task.entry_count > 1, task.question
        assert all(plain_entries(f"1. {one}") == [one] for one in task.right_entries), task.question
        answer = "\n".join(
            f"{n}. {one.title()}" for n, one in enumerate(sorted(task.right_entries), 1)
        )
        assert task.score_answer(answer) == 1


def test_what_is_right_is_what_was_asked_for() -> None:
    for task in make_lists(300, 3):
        numbers = [int(one) for one in re.findall(r"\d+", task.question)]
        if task.kind == "lettered":
            letter = task.question.split("letter ")[1][0].lower()
            assert all(one.startswith(letter) for one in task.right_entries)
        elif task.kind == "multiples":
            assert all(int(one) % numbers[1] == 0 for one in task.right_entries)
        elif task.kind == "between":
            odd = " odd " in task.question
            assert all(int(one) % 2 == odd for one in task.right_entries)
            assert all(numbers[1] <= int(one) <= numbers[2] for one in task.right_entries)
        elif task.kind in ("picked", "first"):
            assert all(
                re.search(rf"\b{one}\b", task.question.lower()) for one in task.right_entries
            )
    assert {name: len(set(text.split())) for name, text in SETS.items()} == {
        name: len(text.split()) for name, text in SETS.items()
    }
    assert len(SETS["states of the United States"].split()) == 50
    assert len(SETS["countries in South America"].split()) == 12
    assert len(SETS["chemical elements"].split()) == 118 + 3  # three are spelled in two ways
