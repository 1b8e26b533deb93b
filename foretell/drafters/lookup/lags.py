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
        known = len(self.text)
        self.text += tokens[known:]
        for at, token in enumerate(self.text[known:], known):
            before = self.places.setdefault(token, [])
            if at >= len(tokens) - WIDTH:
                mask = self.masks.get(token, -1)
                if mask < 0:
                    mask = as_mask(before)
                if len(before) > OFTEN:
                    self.masks[token] = mask | 1 << at
                self.newest.insert(0, mask)
            else:  # too far back to be compared
                self.masks.pop(token, None)
            before.append(at)
        del self.newest[WIDTH:]
        return len(tokens) - known

    def agreement(self, lag: int) -> int:
        """Bit j says whether the token j from the end equals the one `lag` before it, of the newest
        64.
        """
        text = self.text
        end = len(text) - lag
        size = min(WIDTH, end)
        bits = 0
        for same in map(eq, text[len(text) - size :], text[end - size : end]):
            bits = bits << 1 | same
        return bits

    def longest(self) -> int:
        """The lag at which most of the newest tokens in a row match, the smallest of equals; 0:
        none does.
        """
        held = -1
        for back, mask in enumerate(self.newest):
            longer = held & mask << back
            if not longer:
                break
            held = longer
        return len(self.text) - held.bit_length() if held > 0 else 0

    def closest(self) -> int:
        """The lag with most matches in the last 4, 8, 16 and 32 tokens, weighted 4, 2, 1 and 1, the
        smallest of equals.

        0: none has any.
        """
        # A sum for every place at once, as binary numbers: bit p of all digits is that of place p.
        digits = [0] * 8
        for back, (mask, digit) in enumerate(zip(self.newest, WEIGHTS, strict=False)):
            carry = mask << back
            while carry:
                digits[digit], carry = digits[digit] ^ carry, digits[digit] & carry
                digit += 1
        best = -1
        for ones in reversed(digits):
            best = best & ones or best
        return len(self.text) - best.bit_length() if best > 0 else 0


def as_mask(places: list[int]) -> int:
    """The number with these bits set; they ascend."""
    if len(places) <= OFTEN:
        return sum([1 << place for place in places])
    packed = bytearray(places[-1] // 8 + 1)
    for place in places:
        packed[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(packed, "little")
