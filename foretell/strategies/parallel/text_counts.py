"""Counts of n-grams in whole texts, looked up at the places where a token stands."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch

PLACES = 4096  # of a token that are looked at, the latest
LARGEST = 4096  # megabytes of texts
END = -1  # stands before and behind every text


class TextCounts:
    """Texts and the places of every token in them; beyond `megabytes` the older half is dropped."""

    def __init__(self, megabytes: int):
        self.megabytes = megabytes
        self._restart([END])

    def _restart(self, tokens: Sequence[int]) -> None:
        self.tokens = array("i")
        self.places: dict[int, array[int]] = {}
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        for place, token in enumerate(tokens, len(self.tokens)):
            self.places.setdefault(token, array("i")).append(place)
        self.tokens.extend(tokens)

    @property
    def nbytes(self) -> int:
        """An estimate."""
        return 8 * len(self.tokens) + 256 * len(self.places)

    def add(self, text: Sequence[int]) -> None:
        """Takes in a text; of one that is too long its end."""
        self._append([*text, END])
        while self.nbytes > self.megabytes << 20:
            self._restart([END, *self.tokens[len(self.tokens) // 2 + 1 :]])

    def count(
        self, context: Sequence[int], ids: np.ndarray, longest: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """What followed the last 1, 2, ..., `longest` tokens of `context`.

        Returns how often each of ids (m,) did, (longest, m), and how often anything, (longest,).
        """
        hits = np.zeros((longest, len(ids)))
        totals = np.zeros(longest)
        if context[-1] not in self.places:
            return hits, totals
        text = np.frombuffer(self.tokens, np.int32)
        at = np.frombuffer(self.places[context[-1]], np.int32)[-PLACES:]
        at = at[text[at + 1] != END]
        for n, token in enumerate(context[: -longest - 1 : -1]):
            at = at[text[at - n] == token]
            hits[n] = (text[at + 1][:, None] == ids).sum(0)
            totals[n] = len(at)
        return hits, totals

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor(self.tokens, dtype=torch.int32)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes in what `tensors` gave. Raises ValueError if it is none of that."""
        tokens = tensors.get("tokens")
        if tokens is None or tokens.dtype != torch.int32 or tokens.ndim != 1 or not len(tokens):
            raise ValueError("'tokens' must be a list of 32-bit whole numbers")
        if int(tokens.min()) < END or int(tokens[0]) != END or int(tokens[-1]) != END:
            raise ValueError(f"'tokens' must be token ids, with {END} before and behind every text")
        self._restart(tokens.tolist())


def count_in(
    texts: Sequence[TextCounts], context: Sequence[int], ids: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same over several of them together."""
    hits = np.zeros((longest, len(ids)))
    totals = np.zeros(longest)
    for text in texts:
        more_hits, more_totals = text.count(context, ids, longest)
        hits += more_hits
        totals += more_totals
    return hits, totals


def counts_of(text: Sequence[int]) -> TextCounts:
    """Of one text."""
    counts = TextCounts(LARGEST)
    counts.add(text)
    return counts
