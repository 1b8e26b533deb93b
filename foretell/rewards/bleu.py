"""How many of a text's n-grams stand in reference texts: smoothed BLEU.

Of the lengths 1 to 4 it takes the share of the text's n-grams that occur in a reference, each as
often at most as in the reference that has it most often, with one added to both counts; their
geometric mean, lowered where the text is shorter than the shortest reference. Without references of
its own the other texts that are compared are the references, so the one is best that has most in
common with all (minimum Bayes risk).

Paper: Chang et al., BLEUBERI: BLEU is a surprisingly effective reward for instruction following,
arXiv:2505.11080; smoothing by Lin and Och, 2004
Guarantee: lossy: a text that is chosen by it has another distribution than a sample
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
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),  # a dash after a digit
)


@dataclass(frozen=True)
class Bleu(Reward):
    """The reward's reference texts."""

    # Divided by lines of `---`; a spec names a file, references=@FILE. None: the other texts.
    references: Written = ""

    def __post_init__(self) -> None:
        if self.references and not all(part.strip() for part in split_references(self.references)):
            raise BadConfig(
                "bleu:references: one of them is empty; leave no empty text between ---"
            )

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        if self.references:
            reference_texts = split_references(self.references)
            return [bleu_score(text, reference_texts) for text in texts]
        text_scores = []
        for position, text in enumerate(texts):
            other_texts = [
                other_text
                for other_position, other_text in enumerate(texts)
                if other_position != position
            ]
            text_scores.append(bleu_score(text, other_texts) if other_texts else 0.0)
        return text_scores


def split_references(references: str) -> list[str]:
    return re.split(r"^---\s*$", references, flags=re.MULTILINE)


def split_tokens(text: str) -> list[str]:
    """Splits a text into tokens by mteval-v13a."""
    for entity, replacement_text in ENTITIES:
        text = text.replace(entity, replacement_text)
    if "&" in text:
        for entity, replacement_text in ESCAPED:
            text = text.replace(entity, replacement_text)
    text = f" {text} "
    for pattern, replacement in SPLITS:
        text = pattern.sub(replacement, text)
    return text.split()


def count_ngrams(tokens: Sequence[str]) -> Counter[tuple[str, ...]]:
    """Counts how often each n-gram, up to LONGEST, stands in a text."""
    return Counter(
        tuple(tokens[first_token : first_token + gram_length])
        for gram_length in range(1, LONGEST + 1)
        for first_token in range(len(tokens) - gram_length + 1)
    )


def bleu_score(text: str, references: Sequence[str]) -> float:
    """The smoothed BLEU of a text, from 0 to 1; an empty text has 0."""
    tokens = split_tokens(text)
    if not tokens:
        return 0.0
    reference_tokens = [split_tokens(reference) for reference in references]
    reference_counts: Counter[tuple[str, ...]] = Counter()
    for tokens_of_reference in reference_tokens:
        reference_counts |= count_ngrams(tokens_of_reference)
    match_counts = [0] * LONGEST
    for gram, count in (count_ngrams(tokens) & reference_counts).items():
        match_counts[len(gram) - 1] += count
    log_sum = 0.0
    for gram_length, match_count in enumerate(match_counts, 1):
        possible = max(0, len(tokens) - gram_length + 1)
        log_sum += math.log((match_count + 1) / (possible + 1))
    length_ratio = len(tokens) / max(1, min(map(len, reference_tokens), default=1))
    brevity_penalty = 1.0 if length_ratio > 1 else math.exp(1 - 1 / length_ratio)
    return brevity_penalty * math.exp(log_sum / LONGEST)
