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
    """The copy that a text follows, and what was learnt of it.

    `lag`: from a token to its source, 0: none is followed. `held`: the position up to which the
    copy held. `agreement`: bit j < TOP says whether the token j before `held` was what its source,
    or what replaces that, said. `names`: what is drafted for what. `least`: equal votes that decide
    on a name, if they are more than half of all, 0: nothing is learnt. `kept`: tokens that are
    never replaced.
    """

    def __init__(self, min_votes: int, kept_tokens: frozenset[int]):
        self.least = min_votes
        self.kept = kept_tokens
        self.lag = 0
        self.held = 0
        self.agreement = 0
        self.votes: dict[Tokens, dict[Tokens, int]] = {}
        self.names: dict[Tokens, Tokens] = {}
        self.sizes: dict[int, set[int]] = {}  # lengths of what may be replaced, by first token

    def follow_lag(self, text: Sequence[int], lag: int, agreement: int) -> None:
        """Follows this lag from the text's end on."""
        self._hold_lag(lag, len(text), agreement)

    def _hold_lag(self, lag: int, held_end: int, agreement: int) -> None:
        self.lag = lag
        self.held = held_end
        self.agreement = agreement & ((1 << TOP) - 1)

    def is_lost(self, end: int) -> bool:
        """Whether there is no copy to go on with, the text ending there."""
        return not self.lag or end - self.held > SPAN + AGAIN

    def follow_text(self, text: Sequence[int], new_count: int) -> None:
        """Takes in the `new_count` newest tokens."""
        for end in range(len(text) - new_count + 1, len(text) + 1):
            if self.is_lost(end):
                return
            matches_source = text[end - 1] == text[end - 1 - self.lag]
            if matches_source and end - 1 == self.held:
                self._hold_lag(self.lag, end, self.agreement << 1 | 1)
                self._vote_unchanged(text, end)
            elif matches_source and end - 2 == self.held:
                # One token was replaced by one: one that matches is enough.
                self._end_gap(text, end - 1, end, 0)
            else:
                self._look_for_end_of_gap(text, end)

    def _look_for_end_of_gap(self, text: Sequence[int], end: int) -> None:
        match_start = end - AGAIN
        if match_start < self.held:
            return
        for shift in SHIFTS:
            source_start = match_start - self.lag - shift
            is_near = (
                source_start < match_start and 0 <= source_start - self.held + self.lag <= SPAN
            )
            if is_near and text[source_start : source_start + AGAIN] == text[match_start:end]:
                self._end_gap(text, match_start, end, shift)
                return

    def _end_gap(self, text: Sequence[int], match_start: int, end: int, shift: int) -> None:
        """Ends a gap: tokens from `match_start` to `end` match at a lag that is `shift` longer."""
        old_tokens = tuple(text[self.held - self.lag : match_start - self.lag - shift])
        new_tokens = tuple(text[self.held : match_start])
        was_expected = bool(new_tokens) and self.names.get(old_tokens) == new_tokens
        if old_tokens and new_tokens and self.agreement.bit_count() >= TOP // 2:
            self._count_vote(old_tokens, new_tokens)
        # A replacement that was expected counts as if all its tokens had matched.
        gap_bits = ((1 << len(new_tokens)) - 1) * was_expected
        match_bits = (1 << end - match_start) - 1
        agreement = (self.agreement << len(new_tokens) | gap_bits) << end - match_start | match_bits
        self._hold_lag(self.lag + shift, end, agreement)

    def _vote_unchanged(self, text: Sequence[int], end: int) -> None:
        """Counts votes against replacing tokens that stand here unchanged, and were replaced
        elsewhere.
        """
        for run_length in range(1, min(SPAN, end) + 1):
            if run_length in self.sizes.get(text[end - run_length], ()):
                old_tokens = tuple(text[end - run_length : end])
                if old_tokens in self.votes:
                    self._count_vote(old_tokens, old_tokens)

    def _count_vote(self, old_tokens: Tokens, new_tokens: Tokens) -> None:
        if not (self.least and self.kept.isdisjoint((*old_tokens, *new_tokens))):
            return
        name_votes = self.votes.setdefault(old_tokens, {})
        name_votes[new_tokens] = name_votes.get(new_tokens, 0) + 1
        self.sizes.setdefault(old_tokens[0], set()).add(len(old_tokens))
        best_name = max(name_votes, key=name_votes.__getitem__)
        if (
            best_name != old_tokens
            and name_votes[best_name] >= self.least
            and 2 * name_votes[best_name] > sum(name_votes.values())
        ):
            self.names[old_tokens] = best_name
        else:
            self.names.pop(old_tokens, None)

    def find_replacement(self, text: Sequence[int], position: int) -> tuple[int, Tokens]:
        """How many tokens from this place on are replaced, the longest run that is, and by what; 0:
        none.
        """
        for run_length in sorted(self.sizes.get(text[position], ()), reverse=True):
            old_tokens = tuple(text[position : position + run_length])
            if old_tokens in self.names:
                return len(old_tokens), self.names[old_tokens]
        return 0, ()

    def find_begun(self, text: Sequence[int]) -> tuple[int, Tokens]:
        """(tokens that are replaced, what is still to come of what replaces them) where the text
        ends within a replacement.

        One vote is enough here: the beginning of the replacement stands there.
        """
        gap = tuple(text[self.held :])
        source = self.held - self.lag
        if not self.lag or not gap or len(gap) >= SPAN:
            return 0, ()
        for run_length in sorted(self.sizes.get(text[source], ()), reverse=True):
            if run_length > self.lag:
                continue  # it would reach into what replaces it
            old_tokens = tuple(text[source : source + run_length])
            name_votes = self.votes.get(old_tokens, {})
            for new_tokens in sorted(name_votes, key=lambda tokens: -name_votes[tokens]):
                if new_tokens[: len(gap)] == gap and new_tokens != old_tokens:
                    return run_length, new_tokens[len(gap) :]
        return 0, ()
