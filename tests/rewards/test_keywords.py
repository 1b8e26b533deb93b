"""Keywords are whole words, in any case, or phrases."""

from __future__ import annotations

import pytest

from foretell.errors import BadConfig
from foretell.rewards.keywords import Keywords
from foretell.spec import build_reward


def test_the_share_of_words_that_stand_in_a_text() -> None:
    reward = Keywords("dog frisbee|frisbees in_the_park")
    texts = ["A Dog caught frisbees in the park.", "hotdogs in the park", "", "dog dog dog"]
    assert reward.scores("", texts) == [1.0, 1 / 3, 0.0, 1 / 3]
    whole = build_reward("keywords:words=dog frisbee|frisbees in_the_park,all=yes")
    assert whole.scores("", texts) == [1.0, 0.0, 0.0, 0.0]


def test_signs_are_taken_as_they_are() -> None:
    assert Keywords("c++ a.b").scores("", ["c++ and a.b", "axb c+"]) == [1.0, 0.0]


@pytest.mark.parametrize("words", ["", "  ", "dog||cat", "_"])
def test_words_are_needed(words: str) -> None:
    with pytest.raises(BadConfig, match="keywords"):
        Keywords(words)
