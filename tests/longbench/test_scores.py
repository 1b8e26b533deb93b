"""Scorers on answers that hold, and on those that nearly do."""

from __future__ import annotations

import pytest

from foretell.longbench import scores


def test_a_label_stands_anywhere_in_the_answer() -> None:
    assert scores.score_contains(" it is 48213.", ["48213"]) == 1
    assert scores.score_contains(" in RIGA, I think", ["Riga", "Turin"]) == 1
    assert scores.score_contains(" 4821", ["48213"]) == 0
    assert scores.score_contains("", ["a"]) == 0


def test_a_share_counts_whole_words_once() -> None:
    wanted = ["ABC", "DEF", "GHI", "JKL"]
    assert scores.score_share(" abc, abc and Def.", wanted) == 0.5
    assert scores.score_share(" ABCD, XDEF", wanted) == 0


@pytest.mark.parametrize(
    ("answer", "score"), [(" 96.", 1), (" 960", 0), ("about 96 of 7", 1), ("7 of 96", 0), ("", 0)]
)
def test_the_first_number_counts(answer: str, score: float) -> None:
    assert scores.score_number(answer, ["96"]) == score


@pytest.mark.parametrize(
    ("answer", "score"), [(" B) Riga", 1), (" A, not B", 0), ("Best is B.", 1), (" b", 0), ("", 0)]
)
def test_the_first_letter_that_stands_alone_counts(answer: str, score: float) -> None:
    assert scores.score_letter(answer, ["B"]) == score
