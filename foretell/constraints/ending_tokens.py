"""Endings of texts in tokens, for one branch: see constraints.endings, which finds them in
bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from llguidance import LLMatcher

from foretell.constraints.endings import RUN, Search

EFFORT = 512  # of a search after a text
LITTLE = 32  # of one after a token that may come
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
    """The state after some text: matchers of tokens and of bytes, and an ending as both; without
    an ending, the bytes that may follow.
    """

    matcher: LLMatcher
    inner: LLMatcher
    ending: list[int] | None
    ids: list[int]
    bits: bytes = b""


class Endings:
    """Finds endings of the texts of one form, for one branch; see `ending` of core.constraint.

    The ending of a text depends on the text alone, whatever was asked before.
    """

    def __init__(self, search: Search, spellings: Spellings, start: Place):
        """`start`: the place of the empty text, see `begin_endings`."""
        self.search = search
        self.spellings = spellings
        self.places: OrderedDict[tuple[int, ...], Place] = OrderedDict({(): start})

    @classmethod
    def begin_endings(
        cls,
        search: Search,
        spellings: Spellings,
        matcher: LLMatcher,
        inner: LLMatcher,
        ids: list[int] | None,
    ) -> Endings:
        """Begins before any text, where `ids` were found. The matchers are those of tokens and of
        bytes, which nothing else asks, since one gives up with all of its copies where it is asked
        too much between two masks.
        """
        new_endings = cls(search, spellings, Place(matcher, inner, None, []))
        new_endings.places[()] = new_endings._make_place(matcher, inner, ids)
        return new_endings

    def copy_for_branch(self) -> Endings:
        """Returns endings of the same form for another branch."""
        return Endings(self.search, self.spellings, self.places[()])

    def ending_after(self, output: Sequence[int]) -> list[int] | None:
        """Tokens that complete a text after an allowed `output`; None: none were found."""
        return self._place_after(tuple(output)).ending

    def ends_within(self, output: Sequence[int], token: int, room: int) -> bool:
        """Whether after `output` and a token an ending of at most `room` tokens is found."""
        preceding_place = self._place_after(tuple(output))
        if preceding_place.ending and token == preceding_place.ending[0]:
            return len(preceding_place.ending) - 1 <= room
        byte_matcher = preceding_place.inner.deep_copy()
        if not self._read_token(byte_matcher, token):
            return False
        # Each token has one byte or more.
        is_known = preceding_place.ending is not None and len(preceding_place.ids) <= room
        if is_known and self.search.ends_text(byte_matcher, preceding_place.ids):
            return True
        ending_ids = self._known_ending(preceding_place, byte_matcher)
        if ending_ids is None and self._may_find(preceding_place, byte_matcher):
            ending_ids = self.search.find_near(
                byte_matcher, self._known_words(preceding_place), LITTLE
            )
        if ending_ids is None:
            return False
        if len(ending_ids) <= room:
            return True
        if len(ending_ids) > room * self.spellings.longest:
            return False
        matcher = preceding_place.matcher.deep_copy()
        matcher.compute_bitmask()
        matcher.consume_token(token)
        ending = self._spell_tokens(matcher, ending_ids)
        return ending is not None and len(ending) <= room

    # --- places

    def _place_after(self, text: tuple[int, ...]) -> Place:
        if text not in self.places:
            anchor_length = len(text) // ANCHORS * ANCHORS
            known_lengths = (
                prefix_length
                for prefix_length in range(len(text) - 1, anchor_length - 1, -1)
                if text[:prefix_length] in self.places
            )
            known_length = next(known_lengths, None)
            if known_length is None:
                known_length = anchor_length
                self._keep_place(text[:anchor_length], self._place_anchor(text[:anchor_length]))
            place = self.places[text[:known_length]]
            for text_length in range(known_length + 1, len(text) + 1):
                place = self._step_place(place, text[:text_length])
            self._keep_place(text, place)
        self.places.move_to_end(text)
        return self.places[text]

    def _keep_place(self, text: tuple[int, ...], place: Place) -> None:
        self.places[text] = place
        while len(self.places) > KEPT:  # all texts begin with the empty one, which stays
            del self.places[next(kept_text for kept_text in self.places if kept_text)]

    def _place_anchor(self, text: tuple[int, ...]) -> Place:
        """Makes the place after a text by reading on from the nearest known one."""
        nearest_text = max(
            (kept_text for kept_text in self.places if text[: len(kept_text)] == kept_text), key=len
        )
        nearest_place = self.places[nearest_text]
        matcher, byte_matcher = nearest_place.matcher.deep_copy(), nearest_place.inner.deep_copy()
        for position, token in enumerate(text[len(nearest_text) :]):
            if position % (RUN // 4) == 0:
                matcher.compute_bitmask()
                byte_matcher.compute_bitmask()
            matcher.consume_token(token)
            self._read_token(byte_matcher, token)
        ending_ids = self._known_ending(self.places[()], byte_matcher)
        if ending_ids is None:
            ending_ids = self.search.find_ending(
                byte_matcher, self._text_ids(text), self._known_words(), EFFORT
            )
        return self._make_place(matcher, byte_matcher, ending_ids)

    def _step_place(self, preceding_place: Place, text: tuple[int, ...]) -> Place:
        """Makes the place one token further, at the end of `text`."""
        token = text[-1]
        matcher, byte_matcher = (
            preceding_place.matcher.deep_copy(),
            preceding_place.inner.deep_copy(),
        )
        matcher.compute_bitmask()
        byte_matcher.compute_bitmask()
        matcher.consume_token(token)
        self._read_token(byte_matcher, token)
        if preceding_place.ending and token == preceding_place.ending[0]:
            remaining_ids = preceding_place.ids[len(self._token_ids(token)) :]
            return Place(matcher, byte_matcher, preceding_place.ending[1:], remaining_ids)
        ending_ids = self._known_ending(preceding_place, byte_matcher)
        if ending_ids is None and self._may_find(preceding_place, byte_matcher):
            ending_ids = self.search.find_ending(
                byte_matcher, self._text_ids(text), self._known_words(preceding_place), EFFORT
            )
        return self._make_place(matcher, byte_matcher, ending_ids)

    def _make_place(
        self, matcher: LLMatcher, byte_matcher: LLMatcher, ending_ids: list[int] | None
    ) -> Place:
        ending = None if ending_ids is None else self._spell_tokens(matcher, ending_ids)
        if ending_ids is None or ending is None:
            return Place(matcher, byte_matcher, None, [], byte_matcher.compute_bitmask())
        return Place(matcher, byte_matcher, ending, ending_ids)

    def _known_ending(self, preceding_place: Place, byte_matcher: LLMatcher) -> list[int] | None:
        """An ending for where `byte_matcher` stands, by the endings that are known; None: they show
        none.
        """
        following_bits = byte_matcher.compute_bitmask()
        if byte_matcher.is_accepting():
            return []
        return self.search.shortest_tail(
            byte_matcher, self._known_words(preceding_place), following_bits
        )

    def _may_find(self, preceding_place: Place, byte_matcher: LLMatcher) -> bool:
        """Whether a search may find an ending: where there was none before, and the same bytes may
        follow, nothing shows that there is one now.
        """
        return (
            preceding_place.ending is not None
            or byte_matcher.compute_bitmask() != preceding_place.bits
        )

    def _known_words(self, preceding_place: Place | None = None) -> list[list[int]]:
        known_places = (
            [self.places[()]] if preceding_place is None else [preceding_place, self.places[()]]
        )
        return [place.ids for place in known_places if place.ids]

    # --- tokens and bytes

    def _token_ids(self, token: int) -> list[int]:
        """Spells a token in the search's alphabet."""
        alphabet = self.search.alphabet
        token_bytes = b"" if token in alphabet.specials else self.spellings.pieces[token]
        return [token] if not token_bytes else [alphabet.base + byte for byte in token_bytes]

    def _text_ids(self, text: Sequence[int]) -> list[int]:
        return [token_id for token in text for token_id in self._token_ids(token)]

    def _read_token(self, byte_matcher: LLMatcher, token: int) -> bool:
        """Lets the matcher read a token of the text, with masks in between; returns whether it may
        follow.
        """
        token_ids = self._token_ids(token)
        for run_start in range(0, len(token_ids), RUN):
            if run_start:
                byte_matcher.compute_bitmask()
            if byte_matcher.try_consume_tokens(token_ids[run_start : run_start + RUN]) < len(
                token_ids[run_start : run_start + RUN]
            ):
                return False
        return True

    def _spell_tokens(
        self, start_matcher: LLMatcher, ending_ids: Sequence[int]
    ) -> list[int] | None:
        """Spells an ending in tokens that may follow one another, the longest ones; None: they may
        not.
        """
        base, spellings = self.search.alphabet.base, self.spellings
        matcher = start_matcher.deep_copy()
        spelled_tokens: list[int] = []
        position = 0
        while position < len(ending_ids):
            following_bits = matcher.compute_bitmask()
            token: int | None = ending_ids[position]
            byte_count = 1
            if ending_ids[position] >= base:
                nearby_ids = ending_ids[position : position + spellings.longest]
                byte_run = bytes(byte_id - base for byte_id in takewhile(base.__le__, nearby_ids))
                for byte_count in range(len(byte_run), 0, -1):
                    token = spellings.tokens.get(byte_run[:byte_count])
                    if token is not None and following_bits[token >> 3] >> (token & 7) & 1:
                        break
                else:
                    return None
            if token is None or matcher.is_error() or not matcher.consume_token(token):
                return None
            spelled_tokens.append(token)
            position += byte_count
        return spelled_tokens if matcher.is_accepting() else None
