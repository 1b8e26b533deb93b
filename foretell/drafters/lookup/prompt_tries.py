"""Tries of texts that begin as earlier ones did: what they have in common is counted once.

Taking in a token costs some ten microseconds; a chat after rows that are shared, whose prompt is
read in no time, would wait for its thousands of tokens. Kept are the tries of a few beginnings,
from which later texts start with a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from foretell.drafters.lookup.suffix_tree import Suffixes, Text

LEAST = 256  # tokens in common that are worth a copy
KEPT = 4  # beginnings, and recent texts that new ones are compared with


class Beginnings:
    """Beginnings of the texts of one tenant."""

    def __init__(self, depth: int):
        self.depth = depth
        self.recent: list[array[int]] = []  # texts, the latest last
        self.kept: list[tuple[Suffixes, Text]] = []  # the one used last at the end

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        kept_bytes = sum(suffixes.nbytes for suffixes, _ in self.kept)
        return kept_bytes + sum(text.itemsize * len(text) for text in self.recent)

    def begin_text(self, tokens: Sequence[int]) -> tuple[Suffixes, Text]:
        """A trie of its own that holds these tokens as one text."""
        new_text = array("i", tokens)
        shared_tokens = max((shared_length(new_text, text) for text in self.recent), default=0)
        self.recent = [*self.recent, new_text][-KEPT:]
        suffixes, text = self._longest_trie(new_text)
        held_count = len(text.tokens)
        if shared_tokens >= held_count + LEAST:
            suffixes.extend(text, new_text[held_count:shared_tokens])
            self.kept = [*self.kept, suffixes.copy_with_text(text)][-KEPT:]
            held_count = shared_tokens
        suffixes.extend(text, new_text[held_count:])
        return suffixes, text

    def _longest_trie(self, tokens: array[int]) -> tuple[Suffixes, Text]:
        """A copy of the longest trie that is kept of what these tokens begin with, or a new one."""
        fitting_tries = [
            pair for pair in self.kept if pair[1].tokens == tokens[: len(pair[1].tokens)]
        ]
        if not fitting_tries:
            return Suffixes(self.depth), Text()
        best_pair = max(fitting_tries, key=lambda pair: len(pair[1].tokens))
        self.kept.remove(best_pair)
        self.kept.append(best_pair)
        return best_pair[0].copy_with_text(best_pair[1])


def shared_length(first_text: array[int], second_text: array[int]) -> int:
    """How many tokens both begin with."""
    max_length = min(len(first_text), len(second_text))
    differences = np.flatnonzero(
        np.array(first_text[:max_length]) != np.array(second_text[:max_length])
    )
    return int(differences[0]) if len(differences) else max_length
