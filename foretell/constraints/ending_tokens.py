"""Endings of texts in tokens, for one branch: see constraints.endings, which finds them in
bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from llguidance import LLMatcher

from foretell.constraints.endings import RUN, Search

EFFORT = 512  # of a search behind a text
LITTLE = 32  # of one behind a token that may come
ANCHORS = 64  # tokens from one place to the next at which an ending is looked for anew
KEPT = 64  # texts whose endings are kept


class Spellings:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, pieces: Sequence[bytes]):
        """`pieces`: the bytes of each token, empty where it has none."""
        self.pieces = list(pieces)
        self.longest = max(map(len, pieces), default=0)
        self.tokens: dict[bytes, int] = {}
        for token, piece in enumerate(pieces):
            if piece:
                self.tokens.setdefault(piece, token)


@dataclass(frozen=True)
class Place:
    """Behind some text: matchers there, of tokens and of bytes, and an ending as both; without one
    what may follow.
    """

    matcher: LLMatcher
    inner: LLMatcher
    ending: list[int] | None
    ids: list[int]
    bits: bytes = b""


class Endings:
    """Endings of the texts of one form, for one branch; see `ending` of core.constraint.

    What is found depends on the text alone, whatever was asked before.
    """

    def __init__(self, search: Search, spellings: Spellings, start: Place):
        """`start`: where `begin` led."""
        self.search = search
        self.spellings = spellings
        self.places: OrderedDict[tuple[int, ...], Place] = OrderedDict({(): start})

    @classmethod
    def begin(
        cls,
        search: Search,
        spellings: Spellings,
        matcher: LLMatcher,
        inner: LLMatcher,
        ids: list[int] | None,
    ) -> Endings:
        """Before any text, where `ids` were found. The matchers are those of tokens and of bytes,
        which nothing else asks, since one gives up with all of its copies where it is asked too
        much between two masks.
        """
        found = cls(search, spellings, Place(matcher, inner, None, []))
        found.places[()] = found._at(matcher, inner, ids)
        return found

    def anew(self) -> Endings:
        """The same for another branch."""
        return Endings(self.search, self.spellings, self.places[()])

    def after(self, output: Sequence[int]) -> list[int] | None:
        """Tokens that make a whole text of an allowed `output`; None: none were found."""
        return self._place(tuple(output)).ending

    def within(self, output: Sequence[int], token: int, room: int) -> bool:
        """Whether behind `output` and a token an ending of at most `room` tokens is found."""
        before = self._place(tuple(output))
        if before.ending and token == before.ending[0]:
            return len(before.ending) - 1 <= room
        inner = before.inner.deep_copy()
        if not self._read(inner, token):
            return False
        # Each token has one byte or more.
        known = before.ending is not None and len(before.ids) <= room
        if known and self.search.ends(inner, before.ids):
            return True
        ids = self._still(before, inner)
        if ids is None and self._new(before, inner):
            ids = self.search.find_near(inner, self._words(before), LITTLE)
        if ids is None:
            return False
        if len(ids) <= room:
            return True
        if len(ids) > room * self.spellings.longest:
            return False
        matcher = before.matcher.deep_copy()
        matcher.compute_bitmask()
        matcher.consume_token(token)
        ending = self._spelled(matcher, ids)
        return ending is not None and len(ending) <= room

    # --- places

    def _place(self, text: tuple[int, ...]) -> Place:
        if text not in self.places:
            anchor = len(text) // ANCHORS * ANCHORS
            known = (n for n in range(len(text) - 1, anchor - 1, -1) if text[:n] in self.places)
            begun = next(known, None)
            if begun is None:
                begun = anchor
                self._keep(text[:anchor], self._anchor(text[:anchor]))
            place = self.places[text[:begun]]
            for end in range(begun + 1, len(text) + 1):
                place = self._step(place, text[:end])
            self._keep(text, place)
        self.places.move_to_end(text)
        return self.places[text]

    def _keep(self, text: tuple[int, ...], place: Place) -> None:
        self.places[text] = place
        while len(self.places) > KEPT:  # all texts begin with the empty one, which stays
            del self.places[next(known for known in self.places if known)]

    def _anchor(self, text: tuple[int, ...]) -> Place:
        """The place behind a text, whatever stands before its end."""
        near = max((known for known in self.places if text[: len(known)] == known), key=len)
        start = self.places[near]
        matcher, inner = start.matcher.deep_copy(), start.inner.deep_copy()
        for place, token in enumerate(text[len(near) :]):
            if place % (RUN // 4) == 0:
                matcher.compute_bitmask()
                inner.compute_bitmask()
            matcher.consume_token(token)
            self._read(inner, token)
        ids = self._still(self.places[()], inner)
        if ids is None:
            ids = self.search.find(inner, self._bytes(text), self._words(), EFFORT)
        return self._at(matcher, inner, ids)

    def _step(self, before: Place, text: tuple[int, ...]) -> Place:
        """One token on, to the end of `text`."""
        token = text[-1]
        matcher, inner = before.matcher.deep_copy(), before.inner.deep_copy()
        matcher.compute_bitmask()
        inner.compute_bitmask()
        matcher.consume_token(token)
        self._read(inner, token)
        if before.ending and token == before.ending[0]:
            rest = before.ids[len(self._ids(token)) :]
            return Place(matcher, inner, before.ending[1:], rest)
        ids = self._still(before, inner)
        if ids is None and self._new(before, inner):
            ids = self.search.find(inner, self._bytes(text), self._words(before), EFFORT)
        return self._at(matcher, inner, ids)

    def _at(self, matcher: LLMatcher, inner: LLMatcher, ids: list[int] | None) -> Place:
        ending = None if ids is None else self._spelled(matcher, ids)
        if ids is None or ending is None:
            return Place(matcher, inner, None, [], inner.compute_bitmask())
        return Place(matcher, inner, ending, ids)

    def _still(self, before: Place, inner: LLMatcher) -> list[int] | None:
        """An ending where `inner` stands, if one that was known shows one."""
        bits = inner.compute_bitmask()
        if inner.is_accepting():
            return []
        return self.search.tail(inner, self._words(before), bits)

    def _new(self, before: Place, inner: LLMatcher) -> bool:
        """Whether looking for an ending may find one: where there was none before, and the same may
        follow, nothing shows that there is one now.
        """
        return before.ending is not None or inner.compute_bitmask() != before.bits

    def _words(self, before: Place | None = None) -> list[list[int]]:
        places = [self.places[()]] if before is None else [before, self.places[()]]
        return [place.ids for place in places if place.ids]

    # --- tokens and bytes

    def _ids(self, token: int) -> list[int]:
        """A token in the search's alphabet."""
        alphabet = self.search.alphabet
        piece = b"" if token in alphabet.specials else self.spellings.pieces[token]
        return [token] if not piece else [alphabet.base + byte for byte in piece]

    def _bytes(self, text: Sequence[int]) -> list[int]:
        return [one for token in text for one in self._ids(token)]

    def _read(self, inner: LLMatcher, token: int) -> bool:
        """Reads a token of the text, not long behind a mask."""
        ids = self._ids(token)
        for begin in range(0, len(ids), RUN):
            if begin:
                inner.compute_bitmask()
            if inner.try_consume_tokens(ids[begin : begin + RUN]) < len(ids[begin : begin + RUN]):
                return False
        return True

    def _spelled(self, before: LLMatcher, ids: Sequence[int]) -> list[int] | None:
        """The same in tokens that may follow one another, the longest ones; None: they may not."""
        base, spellings = self.search.alphabet.base, self.spellings
        matcher = before.deep_copy()
        found: list[int] = []
        place = 0
        while place < len(ids):
            bits = matcher.compute_bitmask()
            token: int | None = ids[place]
            size = 1
            if ids[place] >= base:
                near = ids[place : place + spellings.longest]
                run = bytes(one - base for one in takewhile(base.__le__, near))
                for size in range(len(run), 0, -1):
                    token = spellings.tokens.get(run[:size])
                    if token is not None and bits[token >> 3] >> (token & 7) & 1:
                        break
                else:
                    return None
            if token is None or matcher.is_error() or not matcher.consume_token(token):
                return None
            found.append(token)
            place += size
        return found if matcher.is_accepting() else None
