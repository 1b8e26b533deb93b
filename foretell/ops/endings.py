"""How a text of some form can be brought to an end, and in how few tokens.

A grammar says which tokens may follow, not how far it is to an end. So ends are looked for:
brackets and quotes first, otherwise whatever leads elsewhere. What is found is an ending, if not
always the shortest one. Most tokens leave the ending of the text before them valid, or a part of
it, so that there is little to look for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST = 1024  # tokens that are tried for an ending before a text begins
STEPS = 64  # at a later place, where the ending before it is known
FAR = 16  # of these, those that are chosen for their length alone
SKIPPED = 8  # tokens of a known ending that a text may have gone past at once
KEPT = 64  # texts whose endings are kept
# What is tried first, and last: by the first byte of a token.
CLOSING = b"}])>,:;0123456789\"'."
OPENING = b"(<[{ \t\r\n"
ESCAPE = b"\\"


class Spellings:
    """The tokens of a vocabulary in the order in which endings try them."""

    def __init__(self, pieces: Sequence[bytes]):
        """`pieces`: the bytes of each token, empty where it has none."""
        self.vocab = len(pieces)
        rest = bytes(byte for byte in range(256) if byte not in CLOSING + OPENING + ESCAPE)
        groups: dict[int, list[int]] = {byte: [] for byte in CLOSING + rest + OPENING}
        written = [token for token, piece in enumerate(pieces) if piece]
        written.sort(key=lambda token: len(pieces[token]))
        self.by_length = np.array(written, dtype=np.int64)
        for token in written:
            piece = pieces[token]
            if piece[0] in groups and _whole(piece):
                groups[piece[0]].append(token)
        self.groups = {byte: np.array(tokens) for byte, tokens in groups.items() if tokens}

    def tried(self, allowed: np.ndarray) -> Iterator[int]:
        """Of the tokens that are allowed, a bool (V,), the shortest for each first byte, and before
        it the longest where that byte closes nothing: it goes on fastest.
        """
        for byte, tokens in self.groups.items():
            able = tokens[allowed[tokens]]
            if able.size and byte not in CLOSING:
                yield int(able[-1])
            if able.size:
                yield int(able[0])

    def longest(self, allowed: np.ndarray) -> int | None:
        """The longest token that is allowed; None: none is."""
        able = self.by_length[allowed[self.by_length]]
        return int(able[-1]) if able.size else None


@dataclass(frozen=True)
class Place:
    """Behind some text: the matcher there and an ending; without one the tokens that may follow,
    as bits.
    """

    matcher: LLMatcher
    ending: list[int] | None
    bits: bytes = b""


class Endings:
    """Endings of the texts of one grammar, for one branch; see `ending` of policy.constraint.

    What is found depends on the text alone, whatever was asked before.
    """

    def __init__(self, search: Search, start: Place):
        """`start`: where `search.begin` led."""
        self.search = search
        self.places: OrderedDict[tuple[int, ...], Place] = OrderedDict({(): start})

    def anew(self) -> Endings:
        """The same for another branch."""
        return Endings(self.search, self.places[()])

    def after(self, output: Sequence[int]) -> list[int] | None:
        """Tokens that make a whole text of an allowed `output`; None: none were found."""
        return self._place(tuple(output)).ending

    def within(self, output: Sequence[int], token: int, room: int) -> bool:
        """Whether behind `output` and a token an ending of at most `room` tokens is found."""
        place = self._place(tuple(output))
        known = place.ending
        fits = known is not None and len(known) <= room
        if known is not None and fits and self.search.ends(place.matcher, [token, *known]):
            return True
        return self.search.ends_within(place, token, room)

    def _place(self, text: tuple[int, ...]) -> Place:
        if text not in self.places:
            begun = text[:-1]
            if begun not in self.places:
                begins = (known for known in self.places if text[: len(known)] == known)
                begun = max(begins, key=len)
            place = self.places[begun]
            for token in text[len(begun) :]:
                place = self.search.step(place, token)
            self.places[text] = place
            if len(self.places) > KEPT:  # all texts begin with the empty one, which stays
                del self.places[next(known for known in self.places if known)]
        self.places.move_to_end(text)
        return self.places[text]


class Search:
    """How endings are found."""

    def __init__(self, spellings: Spellings, end: int):
        """`end`: the token that ends texts."""
        self.spellings = spellings
        self.end = end

    def begin(self, matcher: LLMatcher) -> Place:
        """Before any text. `matcher`: of a grammar that nothing else asks, since it gives up, with
        all of its copies, where it is asked too much between two masks.
        """
        ending = self._found(matcher, [], LONGEST)
        if ending is None:
            return Place(matcher, None, matcher.compute_bitmask())
        return Place(matcher, self._without_detours(matcher, ending))

    def step(self, before: Place, token: int) -> Place:
        """One token on."""
        matcher = before.matcher.deep_copy()
        matcher.consume_token(token)
        ending = self._still(before, token, matcher)
        if ending is None and self._new(before, matcher):
            ending = self._found(matcher, before.ending or [], STEPS)
        return Place(matcher, ending, matcher.compute_bitmask() if ending is None else b"")

    def ends_within(self, before: Place, token: int, room: int) -> bool:
        """Whether the ending that `step` would find has at most `room` tokens."""
        matcher = before.matcher.deep_copy()
        matcher.consume_token(token)
        ending = self._still(before, token, matcher)
        if ending is None and self._new(before, matcher):
            ending = self._walk(matcher, before.ending or [], min(room, STEPS), False)
        return ending is not None and len(ending) <= room

    def ends(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Whether these tokens end the text."""
        return bool(matcher.validate_tokens([*tokens, self.end]) == len(tokens) + 1)

    def _still(self, before: Place, token: int, matcher: LLMatcher) -> list[int] | None:
        """An ending behind `token`, where `matcher` stands, if the one before it shows one."""
        known = before.ending
        if matcher.is_accepting():
            return []
        if known and token == known[0]:
            return known[1:]
        return self._rest(matcher, known or []) or None

    def _new(self, before: Place, matcher: LLMatcher) -> bool:
        """Whether looking for an ending may find one: where there was none before, and the same may
        follow, nothing shows that there is one now.
        """
        return before.ending is not None or matcher.compute_bitmask() != before.bits

    def _found(self, matcher: LLMatcher, known: list[int], steps: int) -> list[int] | None:
        """An ending from here. `known`: one of the text without its last token, some last part of
        which often ends this one.
        """
        for restless in (False, True):
            ending = self._walk(matcher, known, steps, restless)
            if ending is not None:
                break
        return ending

    def _walk(
        self, before: LLMatcher, known: list[int], steps: int, restless: bool
    ) -> list[int] | None:
        """`restless`: from places that look alike, no token is taken twice where there are more."""
        matcher = before.deep_copy()
        found: list[int] = []
        taken: set[tuple[bytes, int]] = set()
        far = 0
        while len(found) <= steps and far < FAR:
            bits = matcher.compute_bitmask()
            if matcher.is_error():
                return None
            if matcher.is_accepting():
                return found
            rest = self._rest(matcher, known)
            if rest:
                return found + rest
            forced = matcher.compute_ff_tokens()
            token = forced[0] if forced else self._next(matcher, bits, taken)
            if token is None:
                token = self.spellings.longest(self._allowed(bits))
                far += 1
            if token is None:
                return None
            if restless:
                taken.add((bits, token))
            matcher.consume_token(token)
            found.append(token)
        return None

    def _rest(self, matcher: LLMatcher, known: list[int]) -> list[int]:
        """The fewest last tokens of `known` that end the text here, without SKIPPED ones at most;
        none where it takes others.
        """
        for begin in range(min(len(known), SKIPPED + 1) - 1, -1, -1):
            if self.ends(matcher, known[begin:]):
                return known[begin:]
        return []

    def _next(self, matcher: LLMatcher, bits: bytes, taken: set[tuple[bytes, int]]) -> int | None:
        """The first token that ends the text or leads elsewhere, rather one that was not taken."""
        again = None
        for token in self.spellings.tried(self._allowed(bits)):
            behind = matcher.deep_copy()
            behind.consume_token(token)
            following = behind.compute_bitmask()
            if behind.is_error():
                return None
            if behind.is_accepting():
                return token
            if following != bits:
                if (bits, token) not in taken:
                    return token
                again = token if again is None else again
        return again

    def _allowed(self, bits: bytes) -> np.ndarray:
        count = self.spellings.vocab
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=count)
        return mask.view(np.bool_)

    def _without_detours(self, start: LLMatcher, ending: list[int]) -> list[int]:
        """The ending without parts that may be left out, such as properties a schema does not ask
        for: those between two places behind the same token, or before such a place.
        """
        matcher = start.deep_copy()
        place = 0
        while place < len(ending):
            for later in range(len(ending) - 1, place, -1):
                alike = not place or ending[later - 1] == ending[place - 1]
                if alike and self.ends(matcher, ending[later:]):
                    ending = ending[:place] + ending[later:]
                    break
            matcher.compute_bitmask()
            matcher.consume_token(ending[place])
            place += 1
        return ending


def _whole(piece: bytes) -> bool:
    """Whether it cuts no character."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
