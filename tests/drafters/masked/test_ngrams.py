"""Counts by a loop over the text, and a law that sums to 1."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.drafters.masked.ngrams import Ngrams, token_probability

V = 5


def by_hand(texts: list[list[int]], context: list[int], token: int, order: int) -> float:
    """From the longest context to the shortest, counted anew in the texts."""
    if len(context) > order - 1:
        context = context[len(context) - order + 1 :]
    below = 1 / V if not context else by_hand(texts, context[1:], token, order)
    followers = [
        text[place + len(context)]
        for text in texts
        for place in range(len(text) - len(context))
        if text[place : place + len(context)] == context
    ]
    # Of each text apart: a token that followed in both is of two kinds.
    kinds = 0
    for text in texts:
        kinds += len(
            {
                text[place + len(context)]
                for place in range(len(text) - len(context))
                if text[place : place + len(context)] == context
            }
        )
    if not followers:
        return below
    return (followers.count(token) + kinds * below) / (len(followers) + kinds)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_chance_is_that_of_a_loop(order: int) -> None:
    draw = np.random.default_rng(1)
    texts = [draw.integers(0, V, size).tolist() for size in (40, 17)]
    made = [Ngrams(order, text) for text in texts]
    for _ in range(30):
        context = draw.integers(0, V, int(draw.integers(0, 4))).tolist()
        chances = [token_probability(made, context, token, V) for token in range(V)]
        assert sum(chances) == pytest.approx(1) and min(chances) > 0
        want = [by_hand(texts, context, token, order) for token in range(V)]
        assert chances == pytest.approx(want)


def test_a_text_that_grows_is_the_text() -> None:
    text = [0, 1, 2, 0, 1, 3, 0, 1, 2, 2]
    grown = Ngrams(3)
    for place in range(0, len(text), 3):
        grown.learn_tokens(text[place : place + 3])
    whole = Ngrams(3, text)
    assert grown.rows == whole.rows and grown.totals == whole.totals
    assert (
        token_probability([grown], [0, 1], 2, V)
        > token_probability([grown], [0, 1], 3, V)
        > token_probability([grown], [0], 3, V)
    )


def test_an_empty_text_knows_nothing() -> None:
    assert token_probability([Ngrams(3)], [1, 2], 0, V) == 1 / V
