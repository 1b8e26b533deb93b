"""Tries of texts that begin as earlier ones did: what they have in common is counted once.

Taking in a token costs some ten microseconds; a chat behind rows that are shared, whose prompt is
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
    """Of the texts of one tenant."""

    def __init__(self, depth: int):
        self.depth = depth
        self.recent: list[array[int]] = []  # texts, the latest last
        self.kept: list[tuple[Suffixes, Text]] = []  # the one used last at the end

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        held = sum(suffixes.nbytes for suffixes, _ in self.kept)
        return held + sum(text.itemsize * len(text) for text in self.recent)

    def begin(self, tokens: Sequence[int]) -> tuple[Suffixes, Text]:
        """A trie of its own that holds these tokens as one text."""
        new = array("i", tokens)
        common = max((shared_length(new, text) for text in self.recent), default=0)
        self.recent = [*self.recent, new][-KEPT:]
        suffixes, text = self._longest(new)
        held = len(text.tokens)
        if common >= held + LEAST:
            suffixes.extend(text, new[held:common])
            self.kept = [*self.kept, suffixes.copied(text)][-KEPT:]
            held = common
        suffixes.extend(text, new[held:])
        return suffixes, text

    def _longest(self, tokens: array[int]) -> tuple[Suffixes, Text]:
        """A copy of the longest trie that is kept of what these tokens begin with, or a new one."""
        fitting = [pair for pair in self.kept if pair[1].tokens == tokens[: len(pair[1].tokens)]]
        if not fitting:
            return Suffixes(self.depth), Text()
        best = max(fitting, key=lambda pair: len(pair[1].tokens))
        self.kept.remove(best)
        self.kept.append(best)
        return best[0].copied(best[1])


def shared_length(one: array[int], two: array[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(two))
    differ = np.flatnonzero(np.array(one[:most]) != np.array(two[:most]))
    return int(differ[0]) if len(differ) else most
