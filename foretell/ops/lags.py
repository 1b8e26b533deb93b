"""How well a growing text agrees with itself at every lag, from where its newest tokens stood
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

WIDTH = 64  # newest tokens that are compared
OFTEN = 8  # places of a token above which they are kept as a number
WEIGHTS = (
    (3,) * 4 + (2,) * 4 + (1,) * 8 + (0,) * 16
)  # matches of the newest, the second ... count two to the power of


class Lags:
    """Bit-parallel Hamming distances of a text's newest 64 tokens to all of its places.

    Where a token stood are the ones of a number, bit p for position p. Shifted by how far from the
    end a token is, these numbers say of all places at once whether the text up to there has the
    same token there. The lag of place p is its distance from the last token. Up to some ten
    thousand tokens such numbers are faster than arrays.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.places: dict[int, list[int]] = {}  # of every token
        self.often: dict[int, int] = {}  # the same as a number, of some that stand often
        self.newest: list[
            int
        ] = []  # of the last tokens, the newest first: where each stood before, as a number

    def extend(self, tokens: Sequence[int]) -> int:
        """Takes in what `tokens`, the whole text, has more than last time; returns how many tokens
        that were.
        """
        known = len(self.text)
        self.text += tokens[known:]
        for at, token in enumerate(self.text[known:], known):
            before = self.places.setdefault(token, [])
            if at >= len(tokens) - WIDTH:
                if (mask := self.often.get(token, -1)) < 0:
                    mask = number(before)
                if len(before) > OFTEN:
                    self.often[token] = mask | 1 << at
                self.newest.insert(0, mask)
            else:  # too far back to be compared
                self.often.pop(token, None)
            before.append(at)
        del self.newest[WIDTH:]
        return len(tokens) - known

    def word(self, lag: int) -> int:
        """Bit j says whether the token j from the end equals the one `lag` before it, of the newest
        64.
        """
        text, end, word = self.text, len(self.text) - lag, 0
        size = min(WIDTH, end)
        for same in map(eq, text[len(text) - size :], text[end - size : end]):
            word = word << 1 | same
        return word

    def longest(self) -> int:
        """The lag at which most of the newest tokens in a row match, the smallest of equals; 0:
        none does.
        """
        held = -1
        for back, mask in enumerate(self.newest):
            if not (more := held & mask << back):
                break
            held = more
        return len(self.text) - held.bit_length() if held > 0 else 0

    def closest(self) -> int:
        """The lag with most matches in the last 4, 8, 16 and 32 tokens, weighted 4, 2, 1 and 1, the
        smallest of equals.

        0: none has any.
        """
        digits, best = [0] * 8, -1  # bits p of all digits together: the sum for place p
        for back, (mask, digit) in enumerate(zip(self.newest, WEIGHTS, strict=False)):
            carry = mask << back
            while carry:
                digits[digit], carry = digits[digit] ^ carry, digits[digit] & carry
                digit += 1
        for ones in reversed(digits):
            best = best & ones or best
        return len(self.text) - best.bit_length() if best > 0 else 0


def number(places: list[int]) -> int:
    """With these bits set; they ascend."""
    if len(places) <= OFTEN:
        return sum([1 << place for place in places])
    bits = bytearray(places[-1] // 8 + 1)
    for place in places:
        bits[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(bits, "little")
