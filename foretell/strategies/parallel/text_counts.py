"""Counts of n-grams in whole texts, looked up at the places where a token stands."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch

PLACES = 4096  # of a token that are looked at, the latest
LARGEST = 4096  # megabytes of texts
END = -1  # stands before and after every text


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
        for position, token in enumerate(tokens, len(self.tokens)):
            self.places.setdefault(token, array("i")).append(position)
        self.tokens.extend(tokens)

    @property
    def nbytes(self) -> int:
        """Estimated bytes of texts and places."""
        return 8 * len(self.tokens) + 256 * len(self.places)

    def add(self, text: Sequence[int]) -> None:
        """Takes in a text; of one that is too long its end."""
        self._append([*text, END])
        while self.nbytes > self.megabytes << 20:
            self._restart([END, *self.tokens[len(self.tokens) // 2 + 1 :]])

    def count(
        self, context: Sequence[int], token_ids: np.ndarray, max_context: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Counts what followed the last 1, 2, ..., `max_context` tokens of `context`.

        Returns how often each of ids (m,) did, (longest, m), and how often anything, (longest,).
        """
        hit_counts = np.zeros((max_context, len(token_ids)))
        context_counts = np.zeros(max_context)
        if context[-1] not in self.places:
            return hit_counts, context_counts
        text = np.frombuffer(self.tokens, np.int32)
        positions = np.frombuffer(self.places[context[-1]], np.int32)[-PLACES:]
        positions = positions[text[positions + 1] != END]
        for distance, token in enumerate(context[: -max_context - 1 : -1]):
            positions = positions[text[positions - distance] == token]
            hit_counts[distance] = (text[positions + 1][:, None] == token_ids).sum(0)
            context_counts[distance] = len(positions)
        return hit_counts, context_counts

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor(self.tokens, dtype=torch.int32)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes in what `tensors` gave. Raises ValueError if it is none of that."""
        tokens = tensors.get("tokens")
        if tokens is None or tokens.dtype != torch.int32 or tokens.ndim != 1 or not len(tokens):
            raise ValueError("'tokens' must be a list of 32-bit whole numbers")
        if int(tokens.min()) < END or int(tokens[0]) != END or int(tokens[-1]) != END:
            raise ValueError(f"'tokens' must be token ids, with {END} before and after every text")
        self._restart(tokens.tolist())


def count_in_texts(
    texts: Sequence[TextCounts], context: Sequence[int], token_ids: np.ndarray, max_context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counts as TextCounts.count does, over several texts together."""
    hit_counts = np.zeros((max_context, len(token_ids)))
    context_counts = np.zeros(max_context)
    for text in texts:
        more_hits, more_totals = text.count(context, token_ids, max_context)
        hit_counts += more_hits
        context_counts += more_totals
    return hit_counts, context_counts


def counts_of(text: Sequence[int]) -> TextCounts:
    """Returns the counts of one text."""
    text_counts = TextCounts(LARGEST)
    text_counts.add(text)
    return text_counts
