"""How texts are scored where no one answer is right: words that must stand there, ROUGE-L, BLEU.

ParallelBench multiplies its text scores by a grammar checker's word, and its paraphrases by one of
a language model. Neither stands here: `well_formed` reads signs only, and what a paraphrase keeps
is counted in stems. So the scores of sentences, paraphrases and summaries are ours, and comparable
with each other only.

Source: Lin, ROUGE, 2004 (ROUGE-L, its F-measure); Papineni et al., BLEU, 2002; Lin and Och,
ORANGE, 2004 (counts of longer n-grams have one added).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

GRAMS = 4  # longest n-grams that BLEU counts
WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
SIGN = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
INNER = re.compile(r"[.!?]\s")  # where a sentence ends before another
ENDINGS = ("ing", "ed", "es", "s", "d")  # of an inflected word
PAIRS = {")": "(", "]": "[", "}": "{"}


def words(text: str) -> list[str]:
    """In small letters, without signs."""
    return [word.lower() for word in WORD.findall(text)]


def has_word(text: str, word: str) -> bool:
    """Whether a word stands in a text, in any case, as it is or with an ending."""
    wanted = word.lower()
    return any(
        one == wanted or (one.startswith(wanted) and one[len(wanted) :] in ENDINGS)
        for one in words(text)
    )


def well_formed(text: str) -> bool:
    """Whether a line looks like sentences: a capital letter first, a mark at the end, no word twice
    in a row, brackets and quotes in pairs, three words at least.
    """
    text = text.strip()
    own = words(text)
    if len(own) < 3 or not text[0].isupper() or text[-1] not in ".!?" or "\n" in text:
        return False
    if any(a == b for a, b in pairwise(own)):
        return False
    open_ones: list[str] = []
    for sign in text:
        if sign in PAIRS.values():
            open_ones.append(sign)
        elif sign in PAIRS and (not open_ones or open_ones.pop() != PAIRS[sign]):
            return False
    return not open_ones and text.count('"') % 2 == 0


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of their longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0  # the row above, one to the left
        for place, own in enumerate(other, 1):
            above = row[place]
            row[place] = before + 1 if word == own else max(above, row[place - 1])
            before = above
    return row[-1]


def f_measure(common: float, one: int, other: int) -> float:
    """Of precision common / one and recall common / other."""
    return 2 * common / (one + other) if one and other else 0.0


def rouge_l(text: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words."""
    own, other = words(text), words(reference)
    return f_measure(common_length(own, other), len(own), len(other))


def bleu_parts(text: str, reference: str) -> tuple[list[float], float]:
    """The precision of n-grams of each length, those beyond words with one added to both counts,
    and the brevity penalty.
    """
    own = [one.lower() for one in SIGN.findall(text)]
    other = [one.lower() for one in SIGN.findall(reference)]
    precisions = []
    for n in range(1, GRAMS + 1):
        mine = Counter(tuple(own[i : i + n]) for i in range(len(own) - n + 1))
        theirs = Counter(tuple(other[i : i + n]) for i in range(len(other) - n + 1))
        more = int(n > 1)
        total = mine.total() + more
        precisions.append(((mine & theirs).total() + more) / total if total else 0.0)
    brevity = min(1.0, math.exp(1 - len(other) / len(own))) if own else 0.0
    return precisions, brevity


def bleu(text: str, reference: str) -> float:
    """From 0 to 1, of one text and one reference."""
    precisions, brevity = bleu_parts(text, reference)
    if not min(precisions):
        return 0.0
    return brevity * math.exp(sum(map(math.log, precisions)) / GRAMS)


def stem(word: str) -> str:
    """A word without its ending, where at least three letters stay."""
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def kept(text: str, reference: str) -> float:
    """F-measure of the stems that two texts have in common, in any order."""
    own, other = (Counter(map(stem, words(one))) for one in (text, reference))
    return f_measure((own & other).total(), own.total(), other.total())


def sentence(text: str, wanted: Sequence[str]) -> float:
    """1 for one well-formed sentence that has all these words."""
    single = not INNER.search(text.strip())
    return float(single and well_formed(text) and all(has_word(text, word) for word in wanted))


def paraphrase(text: str, source: str, others: Sequence[str] = ()) -> float:
    """(1 - BLEU against the source) times what it keeps of the source or another paraphrase, of a
    well-formed line; 0 of others.
    """
    text = text.strip()
    if not well_formed(text):
        return 0.0
    return (1 - bleu(text, source)) * max(kept(text, one) for one in (source, *others))


def summary(text: str, reference: str) -> float:
    """ROUGE-L against a reference, of a well-formed line; 0 of others."""
    text = text.strip()
    return rouge_l(text, reference) if well_formed(text) else 0.0
