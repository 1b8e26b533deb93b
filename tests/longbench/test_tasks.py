"""Every task fits its length, asks what its context answers, and is the same for a seed."""

from __future__ import annotations

import re

import pytest

from foretell.errors import BadConfig
from foretell.longbench.tasks import DEPTHS, MORE, TASKS, Item, make_item
from tests.longbench.models import counted

LENGTH = 1500
every = pytest.mark.parametrize("name", TASKS)


def made(name: str, number: int = 0, seed: int = 0, length: int = LENGTH) -> Item:
    return make_item(name, seed, number, length, counted)


@every
def test_a_context_fills_its_length(name: str) -> None:
    for length in (LENGTH, 900):
        tokens = counted(made(name, length=length).context)
        assert length - MORE - 150 < tokens <= length - MORE


@every
def test_a_seed_and_a_number_give_one_item(name: str) -> None:
    assert made(name) == made(name)
    others = [made(name, number=1), made(name, seed=1), made(name, length=LENGTH + 1)]
    assert len({made(name).context, *(one.context for one in others)}) == 4


@every
def test_golden_answers_score_and_other_questions_answers_do_not(name: str) -> None:
    task, turns = TASKS[name], made(name).turns
    assert 1 <= len(turns) <= 5
    assert all(task.score_answer(turn.answer, turn.labels) == 1 for turn in turns)
    wrong = [
        task.score_answer(a.answer, b.labels) for a in turns for b in turns if a.answer != b.answer
    ]
    assert not any(wrong) and (wrong or len(turns) == 1)
    assert all(counted(turn.answer) <= task.max_tokens for turn in turns if name != "variables")


@every
def test_a_context_that_does_not_fit_is_refused(name: str) -> None:
    if name in ("shots", "numbers"):
        assert made(name, length=256).context
        return
    with pytest.raises(BadConfig, match=rf"--lengths 130: {name} does not fit; take at least \d+"):
        made(name, length=130)


@pytest.mark.parametrize("name", ["pairs", "keys"])
def test_a_context_that_is_longer_than_its_parts_is_made_shorter(name: str) -> None:
    def together(text: str) -> int:
        return counted(text) + (60 if len(text) > 1000 else 0)

    for number in range(8):
        one = make_item(name, 0, number, LENGTH, together)
        assert together(one.context) + MORE <= LENGTH


def test_needles_stand_at_their_depth_and_keys_all_in_one_text() -> None:
    for number in range(7):
        one = made("needles", number)
        place = one.context.index("The pass key") / len(one.context)
        assert one.depth == DEPTHS[number % 5] and abs(place - one.depth) < 0.12
        assert one.turns[0].labels[0] in one.context
    text = made("keys").context
    assert len(re.findall("The pass key of the", text)) == 8


def test_variables_are_what_a_loop_finds() -> None:
    one = made("variables")
    values: dict[str, str] = {}
    for name, other, value in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", one.context):
        values[name] = value or values[other]
    for turn in one.turns:
        (asked,) = re.findall(r"value (\d+)\?", turn.question)
        assert set(turn.labels) == {name for name, value in values.items() if value == asked}


def test_numbers_and_shots_are_what_their_contexts_say() -> None:
    one = made("numbers")
    values = [int(line) for line in one.context.splitlines()[1:]]
    wanted = [int(turn.labels[0]) for turn in one.turns]
    assert wanted == [max(values), min(values), values[0], values[-1]]
    one = made("shots")
    shown = dict(re.findall(r"Word: (\w+)\nClass: (\w+)", one.context))
    endings = {word[3:]: colour for word, colour in shown.items()}
    assert len(endings) == 3
    for turn in one.turns:
        (word,) = re.findall(r"Word: (\w+)", turn.question)
        assert endings[word[3:]] == turn.labels[0]


def test_choices_are_different_and_one_is_right() -> None:
    for turn in made("choices").turns:
        offered = dict(re.findall(r"([A-D])\) (\w+)", turn.question))
        (name,) = re.findall(r"does (\w+) live", turn.question)
        assert len(set(offered.values())) == 4
        assert re.search(rf"{name}, .* in {offered[turn.labels[0]]} ", made("choices").context)
