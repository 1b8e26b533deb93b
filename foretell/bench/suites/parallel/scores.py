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


def split_words(text: str) -> list[str]:
    """Words of a text in small letters, without signs."""
    return [word.lower() for word in WORD.findall(text)]


def has_word(text: str, word: str) -> bool:
    """Whether a word stands in a text, in any case, as it is or with an ending."""
    lower_word = word.lower()
    return any(
        text_word == lower_word
        or (text_word.startswith(lower_word) and text_word[len(lower_word) :] in ENDINGS)
        for text_word in split_words(text)
    )


def is_well_formed(text: str) -> bool:
    """Whether a line looks like sentences: a capital letter first, a mark at the end, no word twice
    in a row, brackets and quotes in pairs, three words at least.
    """
    text = text.strip()
    text_words = split_words(text)
    if len(text_words) < 3 or not text[0].isupper() or text[-1] not in ".!?" or "\n" in text:
        return False
    if any(word == next_word for word, next_word in pairwise(text_words)):
        return False
    open_signs: list[str] = []
    for sign in text:
        if sign in PAIRS.values():
            open_signs.append(sign)
        elif sign in PAIRS and (not open_signs or open_signs.pop() != PAIRS[sign]):
            return False
    return not open_signs and text.count('"') % 2 == 0


def subsequence_length(first_words: Sequence[str], second_words: Sequence[str]) -> int:
    """Length of the longest common subsequence of two lists of words."""
    lengths = [0] * (len(second_words) + 1)
    for word in first_words:
        diagonal = 0  # the row above, one to the left
        for column, other_word in enumerate(second_words, 1):
            above = lengths[column]
            lengths[column] = (
                diagonal + 1 if word == other_word else max(above, lengths[column - 1])
            )
            diagonal = above
    return lengths[-1]


def f_measure(common_count: float, first_total: int, second_total: int) -> float:
    """F-measure of the precision common / first_total and the recall common / second_total."""
    return 2 * common_count / (first_total + second_total) if first_total and second_total else 0.0


def rouge_l_score(text: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words."""
    text_words, reference_words = split_words(text), split_words(reference)
    return f_measure(
        subsequence_length(text_words, reference_words), len(text_words), len(reference_words)
    )


def bleu_parts(text: str, reference: str) -> tuple[list[float], float]:
    """The precision of n-grams of each length, those beyond words with one added to both counts,
    and the brevity penalty.
    """
    text_tokens = [sign.lower() for sign in SIGN.findall(text)]
    reference_tokens = [sign.lower() for sign in SIGN.findall(reference)]
    precisions = []
    for gram_length in range(1, GRAMS + 1):
        text_grams = Counter(
            tuple(text_tokens[start : start + gram_length])
            for start in range(len(text_tokens) - gram_length + 1)
        )
        reference_grams = Counter(
            tuple(reference_tokens[start : start + gram_length])
            for start in range(len(reference_tokens) - gram_length + 1)
        )
        smoothing = int(gram_length > 1)
        total = text_grams.total() + smoothing
        precisions.append(
            ((text_grams & reference_grams).total() + smoothing) / total if total else 0.0
        )
    brevity = (
        min(1.0, math.exp(1 - len(reference_tokens) / len(text_tokens))) if text_tokens else 0.0
    )
    return precisions, brevity


def bleu_score(text: str, reference: str) -> float:
    """From 0 to 1, of one text and one reference."""
    precisions, brevity = bleu_parts(text, reference)
    if not min(precisions):
        return 0.0
    return brevity * math.exp(sum(map(math.log, precisions)) / GRAMS)


def stem_word(word: str) -> str:
    """A word without its ending, where at least three letters stay."""
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def shared_stems(text: str, reference: str) -> float:
    """F-measure of the stems that two texts have in common, in any order."""
    text_stems, reference_stems = (
        Counter(map(stem_word, split_words(source_text))) for source_text in (text, reference)
    )
    return f_measure(
        (text_stems & reference_stems).total(), text_stems.total(), reference_stems.total()
    )


def sentence_score(text: str, required_words: Sequence[str]) -> float:
    """1 for one well-formed sentence that has all these words."""
    is_single = not INNER.search(text.strip())
    return float(
        is_single and is_well_formed(text) and all(has_word(text, word) for word in required_words)
    )


def paraphrase_score(text: str, source: str, paraphrases: Sequence[str] = ()) -> float:
    """(1 - BLEU against the source) times what it keeps of the source or another paraphrase, of a
    well-formed line; 0 of others.
    """
    text = text.strip()
    if not is_well_formed(text):
        return 0.0
    return (1 - bleu_score(text, source)) * max(
        shared_stems(text, reference) for reference in (source, *paraphrases)
    )


def summary_score(text: str, reference: str) -> float:
    """ROUGE-L against a reference, of a well-formed line; 0 of others."""
    text = text.strip()
    return rouge_l_score(text, reference) if is_well_formed(text) else 0.0
