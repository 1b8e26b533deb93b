"""Follows a text along the place it is a changed copy of, and learns what was replaced by what.

While tokens equal those one lag before, the copy holds. Where they stop to, the lag at which two
tokens in a row match again, at most SPAN tokens longer or shorter, ends the gap: what stood in it
there was replaced by what stands in it here. Names of several tokens, and of other lengths than
those they replace, are learnt so.
"""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 8  # tokens of what is replaced, and of what it is replaced by, at most
AGAIN = 2  # tokens in a row that end a gap
# newest tokens that are remembered, of which half must have held for anything to be learnt
TOP = 32
SHIFTS = sorted(range(-SPAN, SPAN + 1), key=abs)
Words = tuple[int, ...]


class Aligned:
    """`lag`: from a token to its source, 0: none is followed; `held`: where the copy held last, a
    position behind it.

    `word`: bit j < TOP says whether the token j before `held` was as its source, or as what
    replaces it, said. `names`: what is drafted for what. `least`: equal votes that decide, with
    more than half of all; `kept`: tokens left alone.
    """

    def __init__(self, least: int, kept: frozenset[int]):
        self.least, self.kept = least, kept
        self.lag, self.held, self.word = 0, 0, 0
        self.votes: dict[Words, dict[Words, int]] = {}
        self.names: dict[Words, Words] = {}
        self.sizes: dict[int, set[int]] = {}  # lengths of what may be replaced, by first token

    def anchor(self, text: Sequence[int], lag: int, word: int) -> None:
        """Follows this lag from the text's end on."""
        self.lag, self.held, self.word = lag, len(text), word & (1 << TOP) - 1

    def lost(self, end: int) -> bool:
        """Whether there is nothing to go on with, the text ending there."""
        return not self.lag or end - self.held > SPAN + AGAIN

    def follow(self, text: Sequence[int], new: int) -> None:
        """Takes in the `new` newest tokens."""
        for end in range(len(text) - new + 1, len(text) + 1):
            if self.lost(end):
                return
            if end - 1 == self.held and text[end - 1] == text[end - 1 - self.lag]:
                self.held, self.word = end, (self.word << 1 | 1) & (1 << TOP) - 1
                self._same(text, end)
            elif end - 2 == self.held and text[end - 1] == text[end - 1 - self.lag]:
                self._again(
                    text, end - 1, end, 0
                )  # one token was replaced by one: one that matches is enough
            elif (begin := end - AGAIN) >= self.held:
                for shift in SHIFTS:
                    at = begin - self.lag - shift
                    near = at < begin and 0 <= at - self.held + self.lag <= SPAN
                    if near and text[at : at + AGAIN] == text[begin:end]:
                        self._again(text, begin, end, shift)
                        break

    def _again(self, text: Sequence[int], begin: int, end: int, shift: int) -> None:
        """Ends a gap: the tokens from `begin` to `end` match at a lag that is `shift` longer."""
        old, to = (
            tuple(text[self.held - self.lag : begin - self.lag - shift]),
            tuple(text[self.held : begin]),
        )
        right = bool(to) and self.names.get(old) == to
        if old and to and self.word.bit_count() >= TOP // 2:
            self._vote(old, to)
        # As if all had matched where what was replaced is known.
        word = (self.word << len(to) | ((1 << len(to)) - 1) * right) << end - begin | (
            1 << end - begin
        ) - 1
        self.lag, self.held, self.word = self.lag + shift, end, word & (1 << TOP) - 1

    def _same(self, text: Sequence[int], end: int) -> None:
        """What was replaced elsewhere and stands here as it was speaks against that."""
        for size in range(1, min(SPAN, end) + 1):
            if (
                size in self.sizes.get(text[end - size], ())
                and (old := tuple(text[end - size : end])) in self.votes
            ):
                self._vote(old, old)

    def _vote(self, old: Words, to: Words) -> None:
        if not (self.least and self.kept.isdisjoint((*old, *to))):
            return
        votes = self.votes.setdefault(old, {})
        votes[to] = votes.get(to, 0) + 1
        self.sizes.setdefault(old[0], set()).add(len(old))
        best = max(votes, key=lambda words: votes[words])
        if best != old and votes[best] >= self.least and 2 * votes[best] > sum(votes.values()):
            self.names[old] = best
        else:
            self.names.pop(old, None)

    def replaced(self, text: Sequence[int], at: int) -> tuple[int, Words]:
        """How many tokens from this place on are replaced, the longest that are, and by what; 0:
        none.
        """
        for size in sorted(self.sizes.get(text[at], ()), reverse=True):
            old = tuple(text[at : at + size])
            if old in self.names:
                return len(old), self.names[old]
        return 0, ()

    def begun(self, text: Sequence[int]) -> tuple[int, Words]:
        """(tokens that are replaced, what is still to come of what replaces them) where the text
        ends within that.

        One vote is enough: the beginning of it stands there.
        """
        gap, source = tuple(text[self.held :]), self.held - self.lag
        if not self.lag or not gap or len(gap) >= SPAN:
            return 0, ()
        for size in sorted(self.sizes.get(text[source], ()), reverse=True):
            if size > self.lag:
                continue  # it would reach into what replaces it
            votes = self.votes.get(old := tuple(text[source : source + size]), {})
            for to in sorted(votes, key=lambda words: -votes[words]):
                if to[: len(gap)] == gap and to != old:
                    return size, to[len(gap) :]
        return 0, ()
