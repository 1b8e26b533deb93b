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


def check_ids(field: str, token_ids: Sequence[int], vocab: int) -> None:
    """Raises BadConfig, with the field's name, for an id that a vocabulary of this size has not."""
    for token in token_ids:
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


def completes_stop(
    decode: Callable[[Sequence[int]], str] | None,
    stops: Sequence[str],
    tokens: Sequence[int],
    min_length: int = 0,
) -> bool:
    """Whether the newest of these tokens completed a stop string, one that does not end in the text
    of the first `min_length` tokens.
    """
    if not stops or decode is None or len(tokens) <= min_length:
        return False
    # A stop string may span tokens, each of at least one byte.
    longest_stop = max(len(stop.encode()) for stop in stops)
    window_start = max(0, len(tokens) - longest_stop - 4)
    text = decode(tokens[window_start:])
    early_length = (
        len(decode(tokens[window_start:min_length]).rstrip(PART))
        if window_start < min_length
        else 0
    )
    return any(_find_stop(text, stop, early_length) >= 0 for stop in stops)


def _find_stop(text: str, stop: str, early_length: int) -> int:
    """Position of the first stop string that ends after `early_length` characters; -1: none
    does.
    """
    return text.find(stop, max(0, early_length + 1 - len(stop)))


class Detokenizer:
    """Makes a text of tokens, piece by piece, cut before the first stop string that
    does not end in the text of the first `min_length` tokens.

    Only a window of tokens is decoded again each time, so a long text takes linear time.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), min_length: int = 0
    ):
        self.decode = decode
        self.stops = tuple(stops)
        self.least = min_length if stops else 0
        self.tokens: list[int] = []
        self.start = 0  # of the window
        self.read = 0  # tokens whose text was taken
        self.held = ""  # text that may be the beginning of a stop string
        self.early = 0  # characters of it that are of the first `min_length` tokens
        self.ended = False

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """The text that became certain with these tokens; `final`: no more will come."""
        if self.ended:
            return ""
        early_count = max(0, self.least - len(self.tokens))
        for token in tokens[:early_count]:
            self._take_tokens([token])
            self.early = len(self.held)
        self._take_tokens(tokens[early_count:], final)
        positions = [_find_stop(self.held, stop, self.early) for stop in self.stops]
        stop_positions = [position for position in positions if position >= 0]
        if stop_positions:
            self.ended = True
            return self.held[: min(stop_positions)]
        certain_length = len(self.held) - (0 if final else self._count_begun())
        certain_text = self.held[:certain_length]
        self.held = self.held[certain_length:]
        self.early = max(0, self.early - certain_length)
        return certain_text

    def _take_tokens(self, tokens: Sequence[int], final: bool = False) -> None:
        """Puts the text that is complete with these tokens after what is held."""
        self.tokens += tokens
        known_text = self.decode(self.tokens[self.start : self.read])
        text = self.decode(self.tokens[self.start :])
        if text.endswith(PART) and not final:  # the last character is not complete
            return
        self.held += text[len(known_text) :]
        if len(text) > len(known_text):
            # A decoder may treat a first token differently, so the window keeps the last
            # tokens that had text.
            self.start = self.read
        self.read = len(self.tokens)

    def _count_begun(self) -> int:
        """How many of the last characters held back may begin a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(longest + 1, len(stop)):
                if self.held.endswith(stop[:length]):
                    longest = length
        return longest
