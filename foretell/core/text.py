"""Tokens to text, a few at a time: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from foretell.errors import BadConfig

# The type of a method's field that holds a text; a spec may name a file instead of writing its ids.
TokenIds = Annotated[tuple[int, ...], "ids of a text's tokens"]
# The same of one that is read as it is written.
Written = Annotated[str, "a text"]
PART = "\ufffd"  # what a decoder writes for a part of a character


def check_ids(field: str, ids: Sequence[int], vocab: int) -> None:
    """Raises BadConfig, with the field's name, for an id that a vocabulary of this size has not."""
    for token in ids:
        if not 0 <= token < vocab:
            raise BadConfig.field(field, token, f"ids of the vocabulary, 0 to {vocab - 1}")


def whole_text(name: str, text: str) -> str:
    """The text itself. Raises BadConfig for half a character, as escapes in JSON may leave it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadConfig(
            f"{name}: {half} is half a character (a surrogate without the other); leave it out"
        ) from None
    return text


def stopped(
    decode: Callable[[Sequence[int]], str] | None,
    stops: Sequence[str],
    tokens: Sequence[int],
    least: int = 0,
) -> bool:
    """Whether the newest of these tokens completed a stop string, one that does not end in the text
    of the first `least` tokens.
    """
    if not stops or decode is None or len(tokens) <= least:
        return False
    # A stop string may span tokens, each of at least one byte.
    longest = max(len(stop.encode()) for stop in stops)
    start = max(0, len(tokens) - longest - 4)
    text = decode(tokens[start:])
    early = len(decode(tokens[start:least]).rstrip(PART)) if start < least else 0
    return any(_found(text, stop, early) >= 0 for stop in stops)


def _found(text: str, stop: str, early: int) -> int:
    """Where the first stop string begins that ends behind the first `early` characters; -1: none
    does.
    """
    return text.find(stop, max(0, early + 1 - len(stop)))


class Detokenizer:
    """What `push` returns adds up to the text of all tokens, cut before the first stop string that
    does not end in the text of the first `least` tokens.

    Only a window of tokens is decoded again each time, so a long text takes linear time.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), least: int = 0
    ):
        self.decode = decode
        self.stops = tuple(stops)
        self.least = least if stops else 0
        self.tokens: list[int] = []
        self.start = 0  # of the window
        self.read = 0  # tokens whose text was taken
        self.held = ""  # text that may be the beginning of a stop string
        self.early = 0  # characters of it that are of the first `least` tokens
        self.ended = False

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """The text that became certain with these tokens; `final`: no more will come."""
        if self.ended:
            return ""
        early = max(0, self.least - len(self.tokens))
        for token in tokens[:early]:
            self._read([token])
            self.early = len(self.held)
        self._read(tokens[early:], final)
        places = [_found(self.held, stop, self.early) for stop in self.stops]
        found = [place for place in places if place >= 0]
        if found:
            self.ended = True
            return self.held[: min(found)]
        certain = len(self.held) - (0 if final else self._begun())
        out = self.held[:certain]
        self.held = self.held[certain:]
        self.early = max(0, self.early - certain)
        return out

    def _read(self, tokens: Sequence[int], final: bool = False) -> None:
        """Puts the text that is complete with these tokens behind what is held."""
        self.tokens += tokens
        known = self.decode(self.tokens[self.start : self.read])
        text = self.decode(self.tokens[self.start :])
        if text.endswith(PART) and not final:  # the last character is not complete
            return
        self.held += text[len(known) :]
        if len(text) > len(known):
            # A decoder may treat a first token differently, so the window keeps the last
            # tokens that had text.
            self.start = self.read
        self.read = len(self.tokens)

    def _begun(self) -> int:
        """How many of the last characters held back may begin a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(longest + 1, len(stop)):
                if self.held.endswith(stop[:length]):
                    longest = length
        return longest
