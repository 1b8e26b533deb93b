"""Where a dot in Python code asks for a member of what stands before it, read byte by byte.

Dots in strings, comments and numbers ask for none, nor do those of `...` and of `from . import`.
The text may be anything, also code that is not finished or not right: then what a dot means is a
guess, and no byte is an error. The code in an f-string counts as the string that it stands in.
"""

from __future__ import annotations

import keyword
from typing import NamedTuple

DOT = ord(".")
NEWLINE, BACKSLASH = ord("\n"), ord("\\")
QUOTES = frozenset(b"'\"")
OPENING = {ord("("): b")", ord("["): b"]", ord("{"): b"}"}
NO_VALUES = {word.encode() for word in keyword.kwlist} - {b"None", b"True", b"False"}
DIGITS = frozenset(b"0123456789")
# Bytes of characters beyond ASCII count as letters: a part of one says too little.
NAME_BYTES = frozenset(
    b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_" + bytes(range(128, 256))
)
LONGEST = max(map(len, NO_VALUES)) + 1  # bytes of a word that decide whether it is a keyword
DEEPEST = 8  # brackets by which states are told apart


class Code(NamedTuple):
    """What has to be known of the text so far. `Code()` is the beginning."""

    inside: bytes = b""  # "#" in a comment, the quotes that end it in a string, nothing in code
    # The name that is being written, or a number: 1, 1. behind its dot, 1x with a letter in it.
    word: bytes = b""
    value: bool = False  # whether a value stands before this place, or before the word
    quotes: int = 0  # of the same kind in a row, where they may begin or end a string
    escaped: bool = False  # a backslash stands before this place
    brackets: bytes = b""  # what closes those that are open

    def read(self, byte: int) -> tuple[Code, bool]:
        """What is known behind one more byte, and whether this is a dot that asks for a member."""
        if self.inside == b"#":
            return (self._code(byte) if byte == NEWLINE else self), False
        if self.inside:
            return self._string(byte)
        if byte in NAME_BYTES:
            return self._replace(word=self._longer(byte), escaped=False), False
        if byte == DOT:
            if self.word == b"1":
                return self._replace(word=b"1."), False
            return self._replace(word=b"", value=False, escaped=False), self._valued()
        return self._code(byte), False

    @property
    def key(self) -> Code:
        """The same for texts that go on alike."""
        return self._replace(brackets=self.brackets[-DEEPEST:])

    def _longer(self, byte: int) -> bytes:
        """The word with one more byte, as far as it matters."""
        word = self.word
        if not word and byte in DIGITS:
            return b"1"
        if not word or word[0] not in DIGITS:
            return (word + bytes([byte]))[:LONGEST]
        return b"1x" if word == b"1" and byte not in DIGITS and byte != ord("_") else word

    def _valued(self) -> bool:
        return self.word not in NO_VALUES if self.word else self.value

    def _code(self, byte: int) -> Code:
        """Behind a byte of code, or the end of a comment, that belongs to no name and is no dot."""
        value = self._valued() if not self.inside else self.value
        now = self._replace(inside=b"", word=b"", value=value, escaped=byte == BACKSLASH)
        if byte == NEWLINE:
            # In brackets, and behind a backslash, an expression goes on in the next line.
            return now if self.brackets or self.escaped else now._replace(value=False)
        if byte in b" \t\r\f\\":
            return now
        if byte in QUOTES:
            return now._replace(inside=bytes([byte]), quotes=1)
        if byte == ord("#"):
            return now._replace(inside=b"#")
        if byte in OPENING:
            return now._replace(value=False, brackets=self.brackets + OPENING[byte])
        if byte in b")]}":
            known = self.brackets[-1:] == bytes([byte])
            return now._replace(value=True, brackets=self.brackets[: -1 if known else None])
        return now._replace(value=False)

    def _string(self, byte: int) -> tuple[Code, bool]:
        quote = self.inside[0]
        if len(self.inside) == 1:
            if self.quotes == 2:  # an empty string, or the beginning of a triple one
                if byte == quote:
                    return self._replace(inside=self.inside * 3, quotes=0), False
                return self._replace(inside=b"", value=True, quotes=0).read(byte)
            if self.quotes == 1 and byte == quote:
                return self._replace(quotes=2), False
        now = self._replace(quotes=0, escaped=False)
        if self.escaped:
            return now, False
        if byte == BACKSLASH:
            return now._replace(escaped=True), False
        if byte == quote:
            met = self.quotes + 1 if len(self.inside) == 3 else 1
            if met == len(self.inside):
                return now._replace(inside=b"", value=True), False
            return now._replace(quotes=met), False
        if byte == NEWLINE and len(self.inside) == 1:  # a string that was not closed
            return now._replace(inside=b"", value=False), False
        return now, False


def read(text: bytes, code: Code | None = None) -> tuple[Code, list[int]]:
    """What is known behind a text, and the places in it of dots that ask for members."""
    code = code or Code()
    dots = []
    for place, byte in enumerate(text):
        code, asks = code.read(byte)
        if asks:
            dots.append(place)
    return code, dots
