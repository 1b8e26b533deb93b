"""Sentences fill what they shall, and needles stand where they shall."""

from __future__ import annotations

import random
from itertools import islice

from foretell.longbench import texts


def test_filler_has_what_ships_once_and_never_ends() -> None:
    made = list(islice(texts.draw_sentences(random.Random(0)), 1000))
    assert set(texts.shipped_sentences()) <= set(made) and len(texts.shipped_sentences()) > 40
    assert all(made.count(sentence) == 1 for sentence in texts.shipped_sentences())
    assert made == list(islice(texts.draw_sentences(random.Random(0)), 1000))
    assert made != list(islice(texts.draw_sentences(random.Random(1)), 1000))


def test_sentences_fill_a_number_of_tokens() -> None:
    for tokens in (0, 50, 1000):
        found = texts.fill_sentences(texts.draw_sentences(random.Random(0)), tokens, len)
        assert sum(len(f" {one}") for one in found) <= tokens
    assert sum(len(f" {one}") for one in found) > 1000 - 250


def test_needles_stand_at_their_depths() -> None:
    text = [f"{number}." for number in range(10)]
    assert texts.plant_needles(text, [(0.0, "A"), (1.0, "C"), (0.5, "B")]).split() == (
        [*("A 0. 1. 2. 3. 4. B 5. 6. 7. 8. 9. C".split())]
    )
    assert text == [f"{number}." for number in range(10)]


def test_names_are_apart_however_many() -> None:
    for count in (1, 128, 300):
        assert len(set(texts.draw_names(random.Random(0), count))) == count
