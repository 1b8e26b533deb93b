"""Weights of tri-grams: what followed each pair of tokens, in prompts and while decoding."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import torch

Pair = tuple[int, int]

KEEP = 12  # successors kept of a pair
GAIN = 0.04  # weight that a tri-gram gains each time it is met
MOST = 3.0  # the largest weight
DOUBT = 0.5  # weight that speaks for a token never seen: few observations promise less than many
ROW_BYTES, CELL_BYTES = 480, 100  # of a pair and of each successor, about


class Trigrams:
    """`rows[pair][token]`: weight above 0. Beyond `limit` bytes the pair met longest ago is
    forgotten. Token ids are below `vocab`.
    """

    def __init__(self, vocab: int, limit: int):
        self.vocab = vocab
        self.limit = limit
        self.cells = 0  # successors of all pairs together
        self.rows: OrderedDict[Pair, dict[int, float]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return ROW_BYTES * len(self.rows) + CELL_BYTES * self.cells

    def learn_gram(self, pair: Pair, token: int, gain: float) -> None:
        """Adds to a weight, up to MOST. Of more than KEEP successors the lightest is forgotten."""
        row = self.rows[pair] = self.rows.pop(pair, {})
        if token not in row:
            if len(row) == KEEP:
                del row[min(row, key=row.__getitem__)]
                self.cells -= 1
            row[token] = 0.0
            self.cells += 1
        row[token] = min(MOST, row[token] + gain)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self.nbytes > self.limit and len(self.rows) > 1:
            _, row = self.rows.popitem(last=False)
            self.cells -= len(row)

    def read_text(self, text: Sequence[int]) -> None:
        """Raises the weights to the shares that the successors of each pair have in `text`."""
        counts: dict[Pair, Counter[int]] = {}
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            counts.setdefault((a, b), Counter())[c] += 1
        for pair, row in counts.items():
            row_total = row.total()
            known_weights = self.rows.get(pair, {})
            for token, count in reversed(row.most_common(KEEP)):
                self.learn_gram(
                    pair, token, max(0.0, count / row_total - known_weights.get(token, 0.0))
                )

    def note_text(self, text: Sequence[int]) -> None:
        """Adds GAIN to the weight of every tri-gram of `text`."""
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            self.learn_gram((a, b), c, GAIN)

    def successors_of(self, pair: Pair) -> list[tuple[int, float]]:
        """(successor, its probability), heaviest first."""
        row = self.rows.get(pair)
        if not row:
            return []
        row_total = sum(row.values()) + DOUBT
        chances = [(token, weight / row_total) for token, weight in row.items()]
        return sorted(chances, key=lambda item: -item[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """For `restore`: trigrams (C, 3), the pair met longest ago first, and their weights
        (C,).
        """
        trigrams: list[tuple[int, int, int]] = []
        weights: list[float] = []
        for pair, row in self.rows.items():
            trigrams += [(*pair, token) for token in row]
            weights += row.values()
        return {
            "trigrams": torch.tensor(trigrams, dtype=torch.int64).reshape(-1, 3),
            "weights": torch.tensor(weights, dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was learnt, without the oldest if they are too many. Raises
        ValueError.
        """
        trigram_count = tensors["weights"].numel() if "weights" in tensors else 0
        for name, dtype, shape in (
            ("weights", torch.float64, (trigram_count,)),
            ("trigrams", torch.int64, (trigram_count, 3)),
        ):
            tensor = tensors.get(name)
            if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is missing, not {dtype} or not of shape {[*shape]}")
        trigrams, weights = tensors["trigrams"], tensors["weights"]
        if bool((trigrams < 0).any() | (trigrams >= self.vocab).any()):
            raise ValueError(f"trigrams holds a token beyond the vocabulary of {self.vocab} tokens")
        if not bool(((weights > 0) & (weights <= MOST)).all()):
            raise ValueError(f"weights are not all above 0 and at most {MOST}")
        rows: OrderedDict[Pair, dict[int, float]] = OrderedDict()
        for (a, b, c), weight in zip(trigrams.tolist(), weights.tolist(), strict=True):
            rows.setdefault((a, b), {})[c] = weight
        row_sizes = [len(row) for row in rows.values()]
        if sum(row_sizes) < trigram_count or max(row_sizes, default=0) > KEEP:
            raise ValueError(f"trigrams holds one twice, or more than {KEEP} for a pair")
        self.rows = rows
        self.cells = trigram_count
        self._forget_oldest()
