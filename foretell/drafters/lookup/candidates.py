"""The candidates that the target last had after a token or a pair of tokens, and how often such
ones were right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from struct import unpack_from

import numpy as np
import torch

# between kinds of candidates, by their share of the row
LEVELS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
KINDS = len(LEVELS) + 1
NONE = 255  # the kind of no candidate
# kinds after a token -> the same after a pair
OF_PAIR = bytes((kind + KINDS) % 256 for kind in range(256))
ODDS = (2.0, 3.0, 5.0, 10.0, 30.0)  # that a spine's token is right, before anything was measured
ENTRY = 200  # bytes that a row takes besides its content


class Store:
    """Candidates after a token or a pair of tokens, those not seen for longest giving way; and how
    often each kind of them is right.

    A key is a token, plus (the token before it + 1) * vocab for a pair; its row is k candidates,
    best first, and their softmax as the target last had them. Score 0: no candidate.
    """

    def __init__(self, vocab: int, k: int, megabytes: int):
        self.vocab = vocab
        self.k = k
        self.row = np.dtype([("ids", "<i4", (k,)), ("scores", "<f4", (k,)), ("kinds", "u1", (k,))])
        self.capacity = (megabytes << 20) // (ENTRY + self.row.itemsize)
        self.rows: OrderedDict[int, bytes] = OrderedDict()
        self.chance = initial_chances()  # by kind
        self.seen = [0] * len(self.chance)  # trials, by kind

    @property
    def nbytes(self) -> int:
        return len(self.rows) * (ENTRY + self.row.itemsize)

    def put(self, keys: Sequence[int], ids: np.ndarray, scores: np.ndarray) -> None:
        """Rows (n, at most k) of n keys, best first. Of a key that stands there twice the last row
        counts.
        """
        self.keep(zip(keys, self.pack(ids, scores), strict=True))

    def pack(self, ids: np.ndarray, scores: np.ndarray) -> list[bytes]:
        """What is kept of such rows."""
        width = ids.shape[1]
        block = np.zeros(len(ids), self.row)
        block["ids"][:, :width] = ids
        block["scores"][:, :width] = scores
        block["kinds"] = NONE
        kinds = np.searchsorted(LEVELS, scores, "right")
        block["kinds"][:, :width] = np.where(scores > 0, kinds, NONE)
        flat = block.tobytes()
        size = self.row.itemsize
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def keep(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Keeps packed rows, (key, row), as those seen last."""
        rows = self.rows
        for key, row in entries:
            rows[key] = row
            rows.move_to_end(key)
        while len(rows) > self.capacity:
            rows.popitem(last=False)

    def after(self, before: int, token: int) -> tuple[Sequence[int], Sequence[int]]:
        """The candidates after the pair, else after the token, best first, and their kinds."""
        pair = self.rows.get((before + 1) * self.vocab + token)
        row = self.rows.get(token) if pair is None else pair
        if row is None:
            return (), ()
        kinds = row[8 * self.k :].rstrip(b"\xff")
        ids = unpack_from(f"<{len(kinds)}i", row)
        return ids, kinds if pair is None else kinds.translate(OF_PAIR)

    def learn(self, kind: int, right: bool) -> None:
        self.seen[kind] = min(64, self.seen[kind] + 1)
        self.chance[kind] += (right - self.chance[kind]) / (4 + self.seen[kind])

    def tensors(self) -> dict[str, torch.Tensor]:
        """`keys` (n,), the one seen longest ago first, `ids` and `scores` (n, k); `chance` and
        `seen` of each class.
        """
        block = np.frombuffer(b"".join(self.rows.values()), self.row)
        parts = {
            "ids": block["ids"].copy(),
            "scores": block["scores"].copy(),
            "keys": np.array(list(self.rows), np.int64),
            "chance": np.array(self.chance),
            "seen": np.array(self.seen),
        }
        return {name: torch.from_numpy(part) for name, part in parts.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was learnt, without the oldest if they are too many. Raises
        ValueError.
        """
        if tensors.keys() != {"keys", "ids", "scores", "chance", "seen"}:
            names = ", ".join(tensors)
            raise ValueError(f"holds {names}, which are not the parts of a goose store")
        size, kinds = tensors["keys"].numel(), len(self.chance)
        for name, dtype, shape, high in (
            ("keys", torch.int64, (size,), (self.vocab + 1) * self.vocab - 1),
            ("seen", torch.int64, (kinds,), 64),
            ("ids", torch.int32, (size, self.k), self.vocab - 1),
            ("scores", torch.float32, (size, self.k), 1),
            ("chance", torch.float64, (kinds,), 1),
        ):
            part = tensors[name]
            right = part.dtype == dtype and part.shape == shape
            if not right or not bool(((part >= 0) & (part <= high)).all()):
                raise ValueError(
                    f"{name} is not {dtype} of shape {shape}, all of it between 0 and {high}"
                )
        if len(tensors["keys"].unique()) < size or bool((tensors["scores"].diff() > 0).any()):
            raise ValueError("a key stands there twice, or a row is not best first")
        self.rows.clear()
        self.put(tensors["keys"].tolist(), tensors["ids"].numpy(), tensors["scores"].numpy())
        self.chance = tensors["chance"].tolist()
        self.seen = tensors["seen"].tolist()


def initial_chances() -> list[float]:
    """The chance of each kind before anything was measured.

    First the kinds of candidates after a token, then after a pair, by share of the row; then those
    of a spine's token, by the length of its match, whether the candidates agree and whether its
    places do.
    """
    lows, highs = (0, *LEVELS), (*LEVELS, 1)
    chances = []
    for factor in (0.3, 0.4):
        chances += [factor * (low + high) for low, high in zip(lows, highs, strict=True)]
    for held in ODDS:
        for candidates_agree in (1 / 3, 1, 3):
            for places_agree in (1, 4):
                odds = held * candidates_agree * places_agree
                chances.append(odds / (1 + odds))
    return chances
