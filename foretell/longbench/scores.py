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


def contains(answer: str, wanted: Sequence[str]) -> float:
    """Whether one of the labels stands in the answer, in capitals or not."""
    said = answer.lower()
    return float(any(label.lower() in said for label in wanted))


def share(answer: str, wanted: Sequence[str]) -> float:
    """The share of the labels that stand in the answer as words."""
    said = {*re.findall(r"\w+", answer.lower())}
    return sum(label.lower() in said for label in wanted) / len(wanted)


def number(answer: str, wanted: Sequence[str]) -> float:
    """Whether the first number of the answer is the label."""
    found = NUMBER.search(answer)
    return float(found is not None and float(found[0]) == float(wanted[0]))


def letter(answer: str, wanted: Sequence[str]) -> float:
    """Whether the first letter of a choice that stands alone is the label."""
    found = LETTER.search(answer)
    return float(found is not None and found[1] == wanted[0])
