"""How well a growing text agrees with itself at every lag, seen from its newest tokens.

A lag is how far back a copy begins: at lag 3 each token is compared with the one 3 before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

WIDTH = 64  # newest tokens that are compared
OFTEN = 8  # places of a token above which they are kept as a number
# matches of the newest token, the second, ... count two to the power of
WEIGHTS = (3,) * 4 + (2,) * 4 + (1,) * 8 + (0,) * 16


class Lags:
    """Bit-parallel Hamming distances of a text's newest 64 tokens to all of its places.

    The places where a token stood are one number, with bit p set for position p. Shifted by how far
    from the end a token is, these numbers say of all places at once whether the text up to there
    has the same token there. The lag of place p is its distance from the last token. Up to some ten
    thousand tokens such numbers are faster than arrays.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.places: dict[int, list[int]] = {}  # of every token, ascending
        self.masks: dict[int, int] = {}  # the same as a number, of some tokens that stand often
        # Of the last tokens, the newest first: where each stood before, as a number.
        self.newest: list[int] = []

    def extend(self, tokens: Sequence[int]) -> int:
        """Takes in what `tokens`, the whole text, has more than last time; returns how many."""
        known_count = len(self.text)
        self.text += tokens[known_count:]
        for position, token in enumerate(self.text[known_count:], known_count):
            earlier_places = self.places.setdefault(token, [])
            if position >= len(tokens) - WIDTH:
                place_mask = self.masks.get(token, -1)
                if place_mask < 0:
                    place_mask = as_mask(earlier_places)
                if len(earlier_places) > OFTEN:
                    self.masks[token] = place_mask | 1 << position
                self.newest.insert(0, place_mask)
            else:  # too far back to be compared
                self.masks.pop(token, None)
            earlier_places.append(position)
        del self.newest[WIDTH:]
        return len(tokens) - known_count

    def agreement(self, lag: int) -> int:
        """Bit j says whether the token j from the end equals the one `lag` before it, of the newest
        64.
        """
        text = self.text
        end = len(text) - lag
        compared_count = min(WIDTH, end)
        match_bits = 0
        for is_same in map(
            eq, text[len(text) - compared_count :], text[end - compared_count : end]
        ):
            match_bits = match_bits << 1 | is_same
        return match_bits

    def longest_lag(self) -> int:
        """The lag at which most of the newest tokens in a row match, the smallest of equals; 0:
        none does.
        """
        held_mask = -1
        for distance, place_mask in enumerate(self.newest):
            longer_mask = held_mask & place_mask << distance
            if not longer_mask:
                break
            held_mask = longer_mask
        return len(self.text) - held_mask.bit_length() if held_mask > 0 else 0

    def closest_lag(self) -> int:
        """The lag with most matches in the last 4, 8, 16 and 32 tokens, weighted 4, 2, 1 and 1, the
        smallest of equals.

        0: none has any.
        """
        # A sum for every place at once, as binary numbers: bit p of all digits is that of place p.
        digits = [0] * 8
        for distance, (place_mask, digit_index) in enumerate(
            zip(self.newest, WEIGHTS, strict=False)
        ):
            carry = place_mask << distance
            while carry:
                digits[digit_index], carry = (
                    digits[digit_index] ^ carry,
                    digits[digit_index] & carry,
                )
                digit_index += 1
        best_mask = -1
        for digit_bits in reversed(digits):
            best_mask = best_mask & digit_bits or best_mask
        return len(self.text) - best_mask.bit_length() if best_mask > 0 else 0


def as_mask(positions: list[int]) -> int:
    """The number with these bits set; they ascend."""
    if len(positions) <= OFTEN:
        return sum([1 << position for position in positions])
    packed_bits = bytearray(positions[-1] // 8 + 1)
    for position in positions:
        packed_bits[position >> 3] |= 1 << (position & 7)
    return int.from_bytes(packed_bits, "little")
