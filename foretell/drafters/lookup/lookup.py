"""N-gram lookup: where the last few tokens of a text stood before, by an index that is kept up to
date in constant time a token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

Gram = tuple[int, ...]


def copy_tokens(tokens: Sequence[int], position: int, size: int) -> list[int]:
    """The `size` tokens from `position` on; a copy that reaches the text's end goes on into itself,
    as in LZ77.
    """
    copied_tokens = list(tokens[position : position + size])
    if len(copied_tokens) < size:
        repeat_count = -(-size // len(copied_tokens))
        copied_tokens = (copied_tokens * repeat_count)[:size]
    return copied_tokens


class Index:
    """For every n-gram of `min_length` to `n` tokens the position after its most recent (or first,
    with `first_only`) occurrence.

    An n-gram at the very end has nothing after it yet; it is taken in with the next token. With
    `keep_all`, the positions after all occurrences are remembered: each leads to the one before
    it.
    """

    def __init__(
        self, n: int, first_only: bool = False, min_length: int = 1, keep_all: bool = False
    ):
        self.n = n
        self.first = first_only
        self.least = min_length
        self.every = keep_all
        self.places: list[dict[Gram, int]] = [{} for _ in range(n)]
        # position -> the one before it, of the same n-gram
        self.older: list[dict[int, int]] = [{} for _ in range(n)]
        self.known = 0  # tokens of the text taken in

    def __deepcopy__(self, memo: dict[int, object]) -> Index:
        """Copies quickly: n-grams and positions never change."""
        twin = copy.copy(self)
        twin.places = [dict(places) for places in self.places]
        twin.older = [dict(older) for older in self.older]
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in what `tokens`, the whole text, has more than last time."""
        for end in range(max(1, self.known), len(tokens)):
            for n in range(self.least, min(self.n, end) + 1):
                gram_places = self.places[n - 1]
                gram = tuple(tokens[end - n : end])
                if self.every and gram in gram_places:
                    self.older[n - 1][end] = gram_places[gram]
                if not (self.first and gram in gram_places):
                    gram_places[gram] = end
        self.known = max(self.known, len(tokens))

    def find_last(self, tokens: Sequence[int], n: int) -> int:
        """The position after an earlier occurrence of the last `n` of `tokens`, or -1."""
        if n > len(tokens):
            return -1
        return self.places[n - 1].get(tuple(tokens[-n:]), -1)

    def find_longest(self, tokens: Sequence[int], min_length: int = 1) -> tuple[int, int]:
        """(position, n) of the longest of the last n, ..., `min_length` tokens that stood before,
        or (-1, 0).
        """
        for n in range(self.n, min_length - 1, -1):
            position = self.find_last(tokens, n)
            if position >= 0:
                return position, n
        return -1, 0

    def all_positions(self, tokens: Sequence[int], n: int, max_places: int) -> list[int]:
        """The positions after the `max_places` most recent occurrences of the last `n` of
        `tokens`, the newest first.
        """
        assert self.every and not self.first, "only an index of every place knows them"
        positions: list[int] = []
        position = self.find_last(tokens, n)
        while position >= 0 and len(positions) < max_places:
            positions.append(position)
            position = self.older[n - 1].get(position, -1)
        return positions
