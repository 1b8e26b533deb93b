"""How many of a text's n-grams stand in reference texts: smoothed BLEU.

Of the lengths 1 to 4 it takes the share of the text's n-grams that occur in a reference, each as
often at most as in the reference that has it most often, with one added to both counts; their
geometric mean, lowered where the text is shorter than the shortest reference. Without references of
its own the other texts that are compared are the references, so the one is best that has most in
common with all (minimum Bayes risk).

Paper: Chang et al., BLEUBERI: BLEU is a surprisingly effective reward for instruction following,
arXiv:2505.11080; smoothing by Lin and Och, 2004
Guarantee: lossy: a text that is chosen by it has another law than a sample
Cost: none
Needs: references, or several texts
Trains: nothing
Differs:
- it is computed as the metric `bleu` of the library evaluate with smooth=True, which the paper uses
- without references it compares the texts with each other, which the paper does not
- an answer tag is not looked for
- tokens are those of that library's own splitter, mteval's version 13a
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.text import Written
from foretell.errors import BadConfig
from foretell.rewards.base import Reward

LONGEST = 4  # tokens of an n-gram
ENTITIES = (("<skipped>", ""), ("-\n", ""), ("\n", " "))
ESCAPED = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
SPLITS = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),  # punctuation
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),  # full stops and commas, unless a digit precedes
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),  # or follows
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),  # a dash behind a digit
)


@dataclass(frozen=True)
class Bleu(Reward):
    """Texts."""

    # Divided by lines of `---`; a spec names a file, references=@FILE. None: the other texts.
    references: Written = ""

    def __post_init__(self) -> None:
        if self.references and not all(part.strip() for part in divided(self.references)):
            raise BadConfig(
                "bleu:references: one of them is empty; leave no empty text between ---"
            )

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        if self.references:
            given = divided(self.references)
            return [bleu(text, given) for text in texts]
        found = []
        for place, text in enumerate(texts):
            others = [other for i, other in enumerate(texts) if i != place]
            found.append(bleu(text, others) if others else 0.0)
        return found


def divided(references: str) -> list[str]:
    return re.split(r"^---\s*$", references, flags=re.MULTILINE)


def words(text: str) -> list[str]:
    """The tokens of a text by mteval-v13a."""
    for old, new in ENTITIES:
        text = text.replace(old, new)
    if "&" in text:
        for old, new in ESCAPED:
            text = text.replace(old, new)
    text = f" {text} "
    for pattern, replacement in SPLITS:
        text = pattern.sub(replacement, text)
    return text.split()


def grams(tokens: Sequence[str]) -> Counter[tuple[str, ...]]:
    """Every n-gram of a text, up to LONGEST, with how often it stands there."""
    return Counter(
        tuple(tokens[start : start + size])
        for size in range(1, LONGEST + 1)
        for start in range(len(tokens) - size + 1)
    )


def bleu(text: str, references: Sequence[str]) -> float:
    """From 0 to 1; an empty text has 0."""
    tokens = words(text)
    if not tokens:
        return 0.0
    parts = [words(reference) for reference in references]
    most: Counter[tuple[str, ...]] = Counter()
    for part in parts:
        most |= grams(part)
    matched = [0] * LONGEST
    for gram, count in (grams(tokens) & most).items():
        matched[len(gram) - 1] += count
    total = 0.0
    for size, hits in enumerate(matched, 1):
        possible = max(0, len(tokens) - size + 1)
        total += math.log((hits + 1) / (possible + 1))
    ratio = len(tokens) / max(1, min(map(len, parts), default=1))
    penalty = 1.0 if ratio > 1 else math.exp(1 - 1 / ratio)
    return penalty * math.exp(total / LONGEST)
