"""Scores of texts, against loops and recursion."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from foretell.bench.suites.parallel import scores

TEXT = "The cat sat on the mat."


def draws(count: int, words: str = "a b c d") -> list[tuple[str, str]]:
    draw = random.Random(0)
    return [
        (
            " ".join(draw.choices(words.split(), k=draw.randint(1, 9))),
            " ".join(draw.choices(words.split(), k=draw.randint(1, 9))),
        )
        for _ in range(count)
    ]


def longest(one: list[str], other: list[str]) -> int:
    """The longest common subsequence, by its recursion."""

    @cache
    def of(i: int, j: int) -> int:
        if not i or not j:
            return 0
        if one[i - 1] == other[j - 1]:
            return of(i - 1, j - 1) + 1
        return max(of(i - 1, j), of(i, j - 1))

    return of(len(one), len(other))


def test_rouge_l_is_that_of_the_recursion() -> None:
    for text, reference in draws(60):
        own, other = text.split(), reference.split()
        common = longest(own, other)
        precision, recall = common / len(own), common / len(other)
        mean = 2 * precision * recall / (precision + recall) if common else 0
        assert scores.rouge_l_score(text, reference) == pytest.approx(mean)
    assert scores.rouge_l_score(TEXT, "the CAT sat, on the mat") == 1
    assert scores.rouge_l_score("", TEXT) == scores.rouge_l_score(TEXT, "") == 0


def test_bleu_is_made_of_counted_n_grams() -> None:
    for text, reference in draws(60):
        own, other = text.split(), reference.split()
        precisions, brevity = scores.bleu_parts(text, reference)
        for n in range(1, 5):
            mine = [own[i : i + n] for i in range(len(own) - n + 1)]
            left = [other[i : i + n] for i in range(len(other) - n + 1)]
            total, found = len(mine), 0
            for gram in mine:
                if gram in left:
                    left.remove(gram)
                    found += 1
            more = n > 1
            assert precisions[n - 1] == pytest.approx((found + more) / (total + more))
        short = len(own) < len(other)
        assert brevity == pytest.approx(math.exp(1 - len(other) / len(own)) if short else 1)
        product = math.prod(precisions) ** 0.25
        assert scores.bleu_score(text, reference) == pytest.approx(brevity * product)
    assert scores.bleu_score(TEXT, TEXT) == pytest.approx(1)
    assert scores.bleu_score("", TEXT) == scores.bleu_score("dog", TEXT) == 0


def test_what_is_kept_counts_stems_in_any_order() -> None:
    for text, reference in draws(40):
        own, left = text.split(), reference.split()
        size, common = len(own) + len(left), 0
        for word in own:
            if word in left:
                left.remove(word)
                common += 1
        assert scores.shared_stems(text, reference) == pytest.approx(2 * common / size)
    assert scores.shared_stems("She paints the walls", "the wall painted she") == 1


@pytest.mark.parametrize(
    ("text", "well"),
    [
        (TEXT, True),
        ("  The cat sat. Then it left!  ", True),
        ('She said "no" (twice).', True),
        ("the cat sat on the mat.", False),
        ("The cat sat on the mat", False),
        ("The the cat sat.", False),
        ("The cat (sat.", False),
        ("The cat] sat.", False),
        ('The "cat sat.', False),
        ("The cat\nsat.", False),
        ("No way.", False),
        ("", False),
    ],
)
def test_signs_tell_what_looks_like_sentences(text: str, well: bool) -> None:
    assert scores.is_well_formed(text) == well


def test_a_sentence_is_one_and_has_all_words() -> None:
    wanted = ("cat", "mat", "sit")
    assert scores.sentence_score("Cats sit on the MAT.", wanted) == 1
    assert scores.sentence_score("The cat on the mat sits.", wanted) == 1
    for text in ("Cats sit.", "Category: mats sit.", "Cats sit here. On a mat.", "cats sit, mat."):
        assert scores.sentence_score(text, wanted) == 0, text


def test_a_paraphrase_keeps_what_is_said_in_other_words() -> None:
    source = "Ilse bought the small bicycle on Monday."
    other = "On Monday, Ilse purchased the little bike."
    copied = scores.paraphrase_score(source, source, [other])
    best = scores.paraphrase_score(other, source, [other])
    elsewhere = scores.paraphrase_score("It rains a lot in the north.", source, [other])
    assert copied == pytest.approx(0) and best > 0.5 > elsewhere
    assert scores.paraphrase_score(other.lower(), source, [other]) == 0
    assert scores.summary_score(other, source) == scores.rouge_l_score(other, source) > 0
    assert scores.summary_score(other.lower(), source) == 0
