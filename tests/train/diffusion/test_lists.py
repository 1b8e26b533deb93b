"""The lists and puzzles that a model learns from, and their tokenizer."""

from __future__ import annotations

import random

import pytest

import foretell
from foretell.bench.suites.parallel.tasks import WORDINGS, make_items, split_of
from foretell.train.diffusion.lists import (
    LONGEST,
    PUZZLES,
    Lists,
    build_tokenizer,
    draw_item,
    list_tokens,
    model_questions,
    seeded_item,
)
from tests import tiny

TURNS = "{% for one in messages %}U:{{ one.content }}\nA:{% endfor %}"

TASKS = (*WORDINGS, *PUZZLES)


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_of_the_part_for_training(task: str) -> None:
    draw = random.Random(task)
    lengths = set()
    for number in range(24):
        made = draw_item(task, draw, one_word=number % 2 == 0)
        assert made.score(made.completion) == 1
        lengths.add(len(made.question.entries))
        if task in WORDINGS and number % 2 == 0:
            assert all(" " not in name for name in made.question.entries)
        elif task in WORDINGS:
            assert all(split_of(name) == "train" for name in made.question.entries)
    assert len(lengths) > 1 or task in PUZZLES


@pytest.mark.parametrize("task", TASKS)
def test_the_tokenizer_knows_all_words_and_gives_texts_back(task: str) -> None:
    made = build_tokenizer()
    draw = random.Random(task)
    asked = [
        *make_items(task, 6, split="test"),
        *(draw_item(task, draw, n % 2 == 0) for n in range(6)),
    ]
    for one in asked:
        text = one.prompt + one.completion
        ids = made.encode(text, add_special_tokens=False)
        assert made.unk_token_id not in ids
        assert made.decode(ids) == text
        prompt = made.encode(one.prompt, add_special_tokens=False)
        assert ids[: len(prompt)] == prompt, "a canvas begins where the prompt ends"


def test_a_name_of_one_word_is_one_token() -> None:
    made = build_tokenizer()
    ids = made.encode(' ["Astrid", "Lotte"]', add_special_tokens=False)
    assert [list_tokens()[i] for i in ids] == [' ["', "Astrid", '", "', "Lotte", '"]']
    assert len(made) == len(list_tokens()) == len(set(list_tokens()))


def test_examples_are_functions_of_seed_and_number() -> None:
    one, two, other = Lists(3), Lists(3), Lists(4)
    two[7]
    for number in (0, 5, 1000):
        a, b, c = one[number], two[number], other[number]
        assert a.given_count == b.given_count and a.ids.tolist() == b.ids.tolist()
        assert a.ids.tolist() != c.ids.tolist()
        assert a.ids[-1] == one.end and len(a.ids) - a.given_count <= LONGEST + 1


@pytest.mark.parametrize("template", [None, TURNS])
def test_another_model_is_asked_as_the_suite_asks_it(template: str | None) -> None:
    own = tiny.tokenizer()
    own = type(own)(tokenizer_object=own.backend_tokenizer, eos_token=tiny.EOS)
    own.chat_template = template
    lm = foretell.wrap(tiny.llama(), own, None, "tiny")
    found = model_questions(lm, 5, 3)
    assert [one.ids.tolist() for one in model_questions(lm, 7, 3)[:5]] == [
        one.ids.tolist() for one in found
    ]
    for number, one in enumerate(found):
        asked, _ = seeded_item(3, number)
        prompt, answer = (
            lm.decode(one.ids[: one.given_count]),
            lm.decode(one.ids[one.given_count :]),
        )
        assert asked.score(answer) == 1 and not one.is_cut
        if template:
            assert prompt == f"U:{asked.prompt}\nA:" and answer == asked.completion.lstrip()
        else:
            assert prompt + answer == asked.prompt + asked.completion
