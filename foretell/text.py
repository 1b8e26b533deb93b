"""Tokens to text, a few at a time: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from foretell.errors import BadConfig

# The type of a method's field that holds a text; a spec may name a file instead of writing its ids.
TokenIds = Annotated[tuple[int, ...], "ids of a text's tokens"]
# The same of one that is read as it is written.
Written = Annotated[str, "a text"]


def check_ids(field: str, ids: Sequence[int], vocab: int) -> None:
    """Raises BadConfig, with the field's name, for an id that a vocabulary of this size has not."""
    for token in ids:
        if not 0 <= token < vocab:
            raise BadConfig.field(field, token, f"ids of the vocabulary, 0 to {vocab - 1}")


def stopped(
    decode: Callable[[Sequence[int]], str] | None, stops: Sequence[str], tokens: Sequence[int]
) -> bool:
    """Whether the newest of these tokens completed a stop string."""
    if not stops or decode is None:
        return False
    # A stop string may span tokens, each of at least one byte.
    longest = max(len(stop.encode()) for stop in stops)
    text = decode(tokens[-longest - 4 :])
    return any(stop in text for stop in stops)


class Detokenizer:
    """What `push` returns adds up to the text of all tokens, cut before the first stop string.

    Only a window of tokens is decoded again each time, so a long text takes linear time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()):
        self.decode = decode
        self.stops = tuple(stops)
        self.tokens: list[int] = []
        self.start = 0  # of the window
        self.read = 0  # tokens whose text was taken
        self.held = ""  # text that may be the beginning of a stop string
        self.ended = False

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """The text that became certain with these tokens; `final`: no more will come."""
        if self.ended:
            return ""
        self.tokens += tokens
        known = self.decode(self.tokens[self.start : self.read])
        text = self.decode(self.tokens[self.start :])
        if final or not text.endswith("\ufffd"):  # else the last character is not complete
            self.held += text[len(known) :]
            if len(text) > len(known):
                # A decoder may treat a first token differently, so the window keeps the last
                # tokens that had text.
                self.start = self.read
            self.read = len(self.tokens)
        places = [self.held.find(stop) for stop in self.stops]
        found = [place for place in places if place >= 0]
        if found:
            self.ended = True
            return self.held[: min(found)]
        certain = len(self.held) - (0 if final else self._begun())
        out = self.held[:certain]
        self.held = self.held[certain:]
        return out

    def _begun(self) -> int:
        """How many of the last characters held back may begin a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(longest + 1, len(stop)):
                if self.held.endswith(stop[:length]):
                    longest = length
        return longest
