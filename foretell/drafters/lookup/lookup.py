"""Where the last few tokens of a text stood before: an index of n-grams, kept up to date in
constant time a token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

Gram = tuple[int, ...]


def copied(tokens: Sequence[int], place: int, size: int) -> list[int]:
    """The `size` tokens from `place` on; a copy that reaches the text's end goes on into itself, as
    in LZ77.
    """
    copy = list(tokens[place : place + size])
    if len(copy) < size:
        times = -(-size // len(copy))
        copy = (copy * times)[:size]
    return copy


class Index:
    """For every n-gram of `least` to `n` tokens the position behind its most recent (or `first`)
    occurrence.

    An n-gram at the very end has nothing behind it yet; it is taken in with the next token. With
    `every`, the positions behind all occurrences are remembered: each leads to the one before it.
    """

    def __init__(self, n: int, first: bool = False, least: int = 1, every: bool = False):
        self.n = n
        self.first = first
        self.least = least
        self.every = every
        self.places: list[dict[Gram, int]] = [{} for _ in range(n)]
        # position -> the one before it, of the same n-gram
        self.older: list[dict[int, int]] = [{} for _ in range(n)]
        self.known = 0  # tokens of the text taken in

    def __deepcopy__(self, memo: dict[int, object]) -> Index:
        """One of its own, quickly: n-grams and positions never change."""
        twin = copy.copy(self)
        twin.places = [dict(places) for places in self.places]
        twin.older = [dict(older) for older in self.older]
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in what `tokens`, the whole text, has more than last time."""
        for end in range(max(1, self.known), len(tokens)):
            for n in range(self.least, min(self.n, end) + 1):
                places = self.places[n - 1]
                gram = tuple(tokens[end - n : end])
                if self.every and gram in places:
                    self.older[n - 1][end] = places[gram]
                if not (self.first and gram in places):
                    places[gram] = end
        self.known = max(self.known, len(tokens))

    def find(self, tokens: Sequence[int], n: int) -> int:
        """The position behind an earlier occurrence of the last `n` of `tokens`, or -1."""
        if n > len(tokens):
            return -1
        return self.places[n - 1].get(tuple(tokens[-n:]), -1)

    def longest(self, tokens: Sequence[int], least: int = 1) -> tuple[int, int]:
        """(position, n) of the longest of the last n, ..., `least` tokens that stood before, or
        (-1, 0).
        """
        for n in range(self.n, least - 1, -1):
            place = self.find(tokens, n)
            if place >= 0:
                return place, n
        return -1, 0

    def all(self, tokens: Sequence[int], n: int, most: int) -> list[int]:
        """The positions behind the `most` most recent occurrences of the last `n` of `tokens`, the
        newest first.
        """
        assert self.every and not self.first, "only an index of every place knows them"
        places: list[int] = []
        place = self.find(tokens, n)
        while place >= 0 and len(places) < most:
            places.append(place)
            place = self.older[n - 1].get(place, -1)
        return places
