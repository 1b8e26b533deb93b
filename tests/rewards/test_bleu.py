"""BLEU against a loop over n-grams, and its closed values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import BadConfig
from foretell.rewards.bleu import Bleu, bleu_score, split_tokens
from foretell.spec import build_reward

texts = st.lists(st.sampled_from("abc"), min_size=1, max_size=7).map(" ".join)


def by_loops(text: str, references: Sequence[str]) -> float:
    """The definition, n-gram by n-gram."""
    tokens, others = text.split(), [reference.split() for reference in references]
    total = 0.0
    for n in range(1, 5):
        own = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        hits = 0
        for gram in set(own):
            most = max(
                sum(tuple(o[i : i + n]) == gram for i in range(len(o) - n + 1)) for o in others
            )
            hits += min(own.count(gram), most)
        total += math.log((hits + 1) / (len(own) + 1)) / 4
    shortest = min(map(len, others))
    brevity = 1.0 if len(tokens) > shortest else math.exp(1 - shortest / len(tokens))
    return brevity * math.exp(total)


@settings(max_examples=60)
@given(texts, st.lists(texts, min_size=1, max_size=3))
def test_it_is_the_definition(text: str, references: list[str]) -> None:
    assert bleu_score(text, references) == pytest.approx(by_loops(text, references), abs=1e-12)
    assert bleu_score(text, references[::-1]) == bleu_score(text, references)


def test_closed_values() -> None:
    assert bleu_score("the cat sat on the mat", ["the cat sat on the mat"]) == pytest.approx(
        1, abs=1e-12
    )
    assert bleu_score("word", ["word"]) == pytest.approx(1, abs=1e-12)
    assert bleu_score("", ["a"]) == bleu_score("  \n", ["a"]) == 0
    # Two of four words, one of three pairs, none above: by hand.
    value = (3 / 5 * 2 / 4 * 1 / 3 * 1 / 2) ** 0.25
    assert bleu_score("the cat ate fish", ["the cat sat down"]) == pytest.approx(value, abs=1e-12)


def test_signs_are_words_but_in_numbers() -> None:
    words = ["Pay", "3.50", ",", "or", "1", "-", "2", "(", "now", ")", "!"]
    assert split_tokens("Pay 3.50, or 1-2 (now)!") == words
    assert split_tokens("a&quot;b") == ["a", '"', "b"] and split_tokens("one-\ntwo") == ["onetwo"]


def test_without_references_the_text_of_most_agreement_wins() -> None:
    scores = Bleu().scores("", ["it is 7", "it is 8 maybe", "it is 7 .", "no"])
    assert scores.index(max(scores)) in (0, 2) and scores[3] == min(scores)
    assert Bleu().scores("", ["alone"]) == [0.0]


def test_references_come_from_a_file(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "answers.txt"
    path.write_text("the answer is 4\n---\nfour\n", "utf-8")
    reward = build_reward(f"bleu:references=@{path}")
    assert reward.scores("", ["four", "five"])[0] == pytest.approx(1, abs=1e-12)
    with pytest.raises(BadConfig, match="one of them is empty"):
        Bleu("a\n---\n \n---\nb")
    with pytest.raises(BadConfig, match="cannot be read"):
        build_reward("bleu:references=@nothing.txt")
