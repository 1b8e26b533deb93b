"""Scores of answers, from 0 to 1.

Source: Li et al., SCBench: A KV Cache-Centric Analysis of Long-Context Methods, arXiv:2412.10319
(the scorers of its tasks).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LETTER = re.compile(r"\b([A-D])\b")
Scorer = Callable[[str, Sequence[str]], float]


def score_contains(answer: str, labels: Sequence[str]) -> float:
    """Whether one of the labels stands in the answer, in capitals or not."""
    lower_answer = answer.lower()
    return float(any(label.lower() in lower_answer for label in labels))


def score_share(answer: str, labels: Sequence[str]) -> float:
    """The share of the labels that stand in the answer as words."""
    answer_words = {*re.findall(r"\w+", answer.lower())}
    return sum(label.lower() in answer_words for label in labels) / len(labels)


def score_number(answer: str, labels: Sequence[str]) -> float:
    """Whether the first number of the answer is the label."""
    number_match = NUMBER.search(answer)
    return float(number_match is not None and float(number_match[0]) == float(labels[0]))


def score_letter(answer: str, labels: Sequence[str]) -> float:
    """Whether the first letter of a choice that stands alone is the label."""
    letter_match = LETTER.search(answer)
    return float(letter_match is not None and letter_match[1] == labels[0])
