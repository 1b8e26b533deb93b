"""The share of given words and phrases that a text has.

A keyword counts where it stands as whole words, whatever the case of its letters. With `all` a text
has 1 where every keyword stands in it, and 0 otherwise.

Paper: Huang et al., DeAL: Decoding-time Alignment for Large Language Models, arXiv:2402.06147
Guarantee: lossy: a text that is chosen by it has another distribution than a sample
Cost: none
Needs: nothing
Trains: nothing
Try: --method best-of --reward "keywords:words=return sum"
Differs:
- other forms of a word (plurals, tenses), which the paper's data set counts as the word, are to be
named as alternatives: words=run|runs|ran
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.errors import BadConfig
from foretell.rewards.base import Reward


@dataclass(frozen=True)
class Keywords(Reward):
    """The keywords, as in `words=dog frisbee|frisbees catch`."""

    words: str = ""  # with spaces between; | between alternatives, _ for a space in a phrase
    all: bool = False  # whether a part of them is worth nothing

    def __post_init__(self) -> None:
        keyword_patterns(self.words)

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        patterns = keyword_patterns(self.words)
        shares = [
            sum(bool(pattern.search(text)) for pattern in patterns) / len(patterns)
            for text in texts
        ]
        return [float(share == 1) for share in shares] if self.all else shares


def keyword_patterns(words: str) -> list[re.Pattern[str]]:
    """Compiles a pattern for each keyword. Raises BadConfig."""
    compiled_patterns = []
    for word in words.split():
        word_forms = [word_form.replace("_", " ") for word_form in word.split("|")]
        if not all(word_form.strip() for word_form in word_forms):
            raise BadConfig.field("keywords:words", words, "words with | between alternatives")
        compiled_patterns.append(
            re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, word_forms))})(?!\w)", re.I)
        )
    if not compiled_patterns:
        raise BadConfig("keywords: there are none; name them, as in keywords:words=dog frisbee")
    return compiled_patterns
