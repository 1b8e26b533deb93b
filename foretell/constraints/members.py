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
    """The state of reading code up to some place. `Code()` is the beginning."""

    context: bytes = b""  # "#" in a comment, the quotes that end it in a string, nothing in code
    # The name that is being written, or a number: 1, 1. after its dot, 1x with a letter in it.
    word: bytes = b""
    follows_value: bool = False  # whether a value stands before this place, or before the word
    quote_count: int = 0  # of the same kind in a row, where they may begin or end a string
    is_escaped: bool = False  # a backslash stands before this place
    brackets: bytes = b""  # what closes those that are open

    def read_byte(self, byte: int) -> tuple[Code, bool]:
        """Returns the state after one more byte, and whether that dot asks for a member."""
        if self.context == b"#":
            return (self._read_code(byte) if byte == NEWLINE else self), False
        if self.context:
            return self._read_string(byte)
        if byte in NAME_BYTES:
            return self._replace(word=self._extend_word(byte), is_escaped=False), False
        if byte == DOT:
            if self.word == b"1":
                return self._replace(word=b"1."), False
            return self._replace(
                word=b"", follows_value=False, is_escaped=False
            ), self._after_value()
        return self._read_code(byte), False

    @property
    def state_key(self) -> Code:
        """A state that is equal for texts that go on alike."""
        return self._replace(brackets=self.brackets[-DEEPEST:])

    def _extend_word(self, byte: int) -> bytes:
        """Returns the word with one more byte, as far as it matters."""
        word = self.word
        if not word and byte in DIGITS:
            return b"1"
        if not word or word[0] not in DIGITS:
            return (word + bytes([byte]))[:LONGEST]
        return b"1x" if word == b"1" and byte not in DIGITS and byte != ord("_") else word

    def _after_value(self) -> bool:
        return self.word not in NO_VALUES if self.word else self.follows_value

    def _read_code(self, byte: int) -> Code:
        """Returns the state after a byte of code, or the end of a comment, that belongs to no name
        and is no dot.
        """
        follows_value = self._after_value() if not self.context else self.follows_value
        next_code = self._replace(
            context=b"", word=b"", follows_value=follows_value, is_escaped=byte == BACKSLASH
        )
        if byte == NEWLINE:
            # In brackets, and after a backslash, an expression goes on in the next line.
            return (
                next_code
                if self.brackets or self.is_escaped
                else next_code._replace(follows_value=False)
            )
        if byte in b" \t\r\f\\":
            return next_code
        if byte in QUOTES:
            return next_code._replace(context=bytes([byte]), quote_count=1)
        if byte == ord("#"):
            return next_code._replace(context=b"#")
        if byte in OPENING:
            return next_code._replace(follows_value=False, brackets=self.brackets + OPENING[byte])
        if byte in b")]}":
            matches_bracket = self.brackets[-1:] == bytes([byte])
            return next_code._replace(
                follows_value=True, brackets=self.brackets[: -1 if matches_bracket else None]
            )
        return next_code._replace(follows_value=False)

    def _read_string(self, byte: int) -> tuple[Code, bool]:
        quote_byte = self.context[0]
        if len(self.context) == 1:
            if self.quote_count == 2:  # an empty string, or the beginning of a triple one
                if byte == quote_byte:
                    return self._replace(context=self.context * 3, quote_count=0), False
                return self._replace(context=b"", follows_value=True, quote_count=0).read_byte(byte)
            if self.quote_count == 1 and byte == quote_byte:
                return self._replace(quote_count=2), False
        next_code = self._replace(quote_count=0, is_escaped=False)
        if self.is_escaped:
            return next_code, False
        if byte == BACKSLASH:
            return next_code._replace(is_escaped=True), False
        if byte == quote_byte:
            quote_count = self.quote_count + 1 if len(self.context) == 3 else 1
            if quote_count == len(self.context):
                return next_code._replace(context=b"", follows_value=True), False
            return next_code._replace(quote_count=quote_count), False
        if byte == NEWLINE and len(self.context) == 1:  # a string that was not closed
            return next_code._replace(context=b"", follows_value=False), False
        return next_code, False


def find_member_dots(text: bytes, state: Code | None = None) -> tuple[Code, list[int]]:
    """Reads a text; returns the state after it, and the positions in it of dots that ask for
    members.
    """
    state = state or Code()
    dot_positions = []
    for position, byte in enumerate(text):
        state, asks_member = state.read_byte(byte)
        if asks_member:
            dot_positions.append(position)
    return state, dot_positions
