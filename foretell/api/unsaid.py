"""Texts that must not come out, however tokens divide them."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import torch

    from foretell.core.constraint import Pieces

LONGEST = 256  # bytes of a text
BETWEEN = b"\xff"  # no text has it


@dataclass(frozen=True)
class Unsaid:
    """A text, and the tokens by which it could come out: an entry of `bad_words`."""

    text: bytes
    pieces: Pieces

    def make_processor(self, prompt: int) -> Silence:
        """The processor of a branch whose output begins after so many tokens."""
        return Silence(self, prompt)

    def completing_tokens(self, written_bytes: bytes, vocab: int) -> list[int]:
        """The tokens after which the text would stand, if that is the end of what is before."""
        spelled = _spell_tokens(self.pieces, vocab)
        completing_ids = spelled.tokens_having(self.text)
        begun = written_bytes.find(self.text[:1])
        while begun >= 0:
            length = len(written_bytes) - begun
            if length < len(self.text) and self.text.startswith(written_bytes[begun:]):
                completing_ids += spelled.tokens_having(BETWEEN + self.text[length:])
            begun = written_bytes.find(self.text[:1], begun + 1)
        return completing_ids


@dataclass(frozen=True)
class Silence:
    """Scores (1, V) without the tokens that would complete a text in the output, which is what
    follows `prompt` tokens.
    """

    unsaid: Unsaid
    prompt: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written_bytes = b""
        position = ids.shape[1] - 1  # of the tokens that are read, from the last one back
        while position >= self.prompt and len(written_bytes) < len(self.unsaid.text) - 1:
            written_bytes = (self.unsaid.pieces.piece(int(ids[0, position])) or b"") + written_bytes
            position -= 1
        tokens = self.unsaid.completing_tokens(written_bytes, scores.shape[1])
        return scores.index_fill(1, ids.new_tensor(tokens), -math.inf)


class Spelled:
    """The bytes of all tokens in a row, in which those that have some text are found at once."""

    def __init__(self, pieces: Pieces, vocab: int):
        parts = [BETWEEN + (pieces.piece(token) or b"") for token in range(vocab)]
        self.row = b"".join([*parts, BETWEEN])
        self.starts = [0, *accumulate(map(len, parts))]

    def tokens_having(self, text: bytes) -> list[int]:
        """The tokens with a text in them; with one that begins with BETWEEN, those that begin with
        the rest.
        """
        having_ids, place = [], self.row.find(text)
        while place >= 0:
            having_ids.append(bisect_right(self.starts, place) - 1)
            place = self.row.find(text, place + 1)
        return having_ids


_spelled_by_pieces: WeakKeyDictionary[Any, Spelled] = WeakKeyDictionary()


def _spell_tokens(pieces: Pieces, vocab: int) -> Spelled:
    spelled_tokens = _spelled_by_pieces.get(pieces)
    if spelled_tokens is None or len(spelled_tokens.starts) != vocab + 1:
        spelled_tokens = _spelled_by_pieces[pieces] = Spelled(pieces, vocab)
    return spelled_tokens
