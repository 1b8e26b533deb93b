"""Follows a text along the place it is a changed copy of, and learns what was replaced by what.

While tokens equal those one lag before, the copy holds. Where they stop doing so, a gap begins. The
lag at which two tokens in a row match again, at most SPAN tokens longer or shorter, ends it: what
stood in the gap there was replaced by what stands in it here. So names of several tokens are learnt
too, and replacements of another length.
"""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 8  # tokens of what is replaced, and of what it is replaced by, at most
AGAIN = 2  # tokens in a row that end a gap
# newest tokens that are remembered, of which half must have held for anything to be learnt
TOP = 32
SHIFTS = sorted(range(-SPAN, SPAN + 1), key=abs)

Tokens = tuple[int, ...]


class Aligned:
    """What is known of the copy under way.

    `lag`: from a token to its source, 0: none is followed. `held`: the position up to which the
    copy held. `agreement`: bit j < TOP says whether the token j before `held` was what its source,
    or what replaces that, said. `names`: what is drafted for what. `least`: equal votes that decide
    on a name, if they are more than half of all, 0: nothing is learnt. `kept`: tokens that are
    never replaced.
    """

    def __init__(self, least: int, kept: frozenset[int]):
        self.least = least
        self.kept = kept
        self.lag = 0
        self.held = 0
        self.agreement = 0
        self.votes: dict[Tokens, dict[Tokens, int]] = {}
        self.names: dict[Tokens, Tokens] = {}
        self.sizes: dict[int, set[int]] = {}  # lengths of what may be replaced, by first token

    def anchor(self, text: Sequence[int], lag: int, agreement: int) -> None:
        """Follows this lag from the text's end on."""
        self._hold(lag, len(text), agreement)

    def _hold(self, lag: int, held: int, agreement: int) -> None:
        self.lag = lag
        self.held = held
        self.agreement = agreement & ((1 << TOP) - 1)

    def lost(self, end: int) -> bool:
        """Whether there is no copy to go on with, the text ending there."""
        return not self.lag or end - self.held > SPAN + AGAIN

    def follow(self, text: Sequence[int], new: int) -> None:
        """Takes in the `new` newest tokens."""
        for end in range(len(text) - new + 1, len(text) + 1):
            if self.lost(end):
                return
            as_before = text[end - 1] == text[end - 1 - self.lag]
            if as_before and end - 1 == self.held:
                self._hold(self.lag, end, self.agreement << 1 | 1)
                self._vote_unchanged(text, end)
            elif as_before and end - 2 == self.held:
                # One token was replaced by one: one that matches is enough.
                self._end_gap(text, end - 1, end, 0)
            else:
                self._look_for_end_of_gap(text, end)

    def _look_for_end_of_gap(self, text: Sequence[int], end: int) -> None:
        begin = end - AGAIN
        if begin < self.held:
            return
        for shift in SHIFTS:
            source = begin - self.lag - shift
            near = source < begin and 0 <= source - self.held + self.lag <= SPAN
            if near and text[source : source + AGAIN] == text[begin:end]:
                self._end_gap(text, begin, end, shift)
                return

    def _end_gap(self, text: Sequence[int], begin: int, end: int, shift: int) -> None:
        """Ends a gap: the tokens from `begin` to `end` match at a lag that is `shift` longer."""
        old = tuple(text[self.held - self.lag : begin - self.lag - shift])
        new = tuple(text[self.held : begin])
        expected = bool(new) and self.names.get(old) == new
        if old and new and self.agreement.bit_count() >= TOP // 2:
            self._vote(old, new)
        # A replacement that was expected counts as if all its tokens had matched.
        gap = ((1 << len(new)) - 1) * expected
        matched = (1 << end - begin) - 1
        agreement = (self.agreement << len(new) | gap) << end - begin | matched
        self._hold(self.lag + shift, end, agreement)

    def _vote_unchanged(self, text: Sequence[int], end: int) -> None:
        """What was replaced elsewhere and stands here unchanged speaks against replacing it."""
        for size in range(1, min(SPAN, end) + 1):
            if size in self.sizes.get(text[end - size], ()):
                old = tuple(text[end - size : end])
                if old in self.votes:
                    self._vote(old, old)

    def _vote(self, old: Tokens, new: Tokens) -> None:
        if not (self.least and self.kept.isdisjoint((*old, *new))):
            return
        votes = self.votes.setdefault(old, {})
        votes[new] = votes.get(new, 0) + 1
        self.sizes.setdefault(old[0], set()).add(len(old))
        best = max(votes, key=votes.__getitem__)
        if best != old and votes[best] >= self.least and 2 * votes[best] > sum(votes.values()):
            self.names[old] = best
        else:
            self.names.pop(old, None)

    def replaced(self, text: Sequence[int], at: int) -> tuple[int, Tokens]:
        """How many tokens from this place on are replaced, the longest run that is, and by what; 0:
        none.
        """
        for size in sorted(self.sizes.get(text[at], ()), reverse=True):
            old = tuple(text[at : at + size])
            if old in self.names:
                return len(old), self.names[old]
        return 0, ()

    def begun(self, text: Sequence[int]) -> tuple[int, Tokens]:
        """(tokens that are replaced, what is still to come of what replaces them) where the text
        ends within a replacement.

        One vote is enough here: the beginning of the replacement stands there.
        """
        gap = tuple(text[self.held :])
        source = self.held - self.lag
        if not self.lag or not gap or len(gap) >= SPAN:
            return 0, ()
        for size in sorted(self.sizes.get(text[source], ()), reverse=True):
            if size > self.lag:
                continue  # it would reach into what replaces it
            old = tuple(text[source : source + size])
            votes = self.votes.get(old, {})
            for new in sorted(votes, key=lambda tokens: -votes[tokens]):
                if new[: len(gap)] == gap and new != old:
                    return size, new[len(gap) :]
        return 0, ()
