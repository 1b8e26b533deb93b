"""The candidates that the target last had after a token or a pair of tokens, and how often such
ones were right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from struct import unpack_from

import numpy as np
import torch

LEVELS = (
    0.005,
    0.02,
    0.05,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    0.95,
)  # between classes of candidates, by share of their row
KINDS = len(LEVELS) + 1
NONE = 255  # the class of no candidate
OF_PAIR = bytes(
    (kind + KINDS) % 256 for kind in range(256)
)  # classes after a token -> the same after a pair
ODDS = (2.0, 3.0, 5.0, 10.0, 30.0)  # that one is right, before anything was measured
ENTRY = 200  # bytes that a row takes besides its content


class Store:
    """Candidates after a token or a pair of tokens, those not seen for longest giving way; and how
    often each is right.

    A key is a token, plus (the token before it + 1) * vocab for a pair; its row is k candidates,
    best first, and their softmax as the target last had them. Score 0: no candidate.
    """

    def __init__(self, vocab: int, k: int, megabytes: int):
        self.vocab, self.k, self.ids = vocab, k, f"<{k}i"
        self.row = np.dtype([("ids", "<i4", (k,)), ("scores", "<f4", (k,)), ("kinds", "u1", (k,))])
        self.capacity = (megabytes << 20) // (ENTRY + self.row.itemsize)
        self.rows: OrderedDict[int, bytes] = OrderedDict()
        self.chance = [
            f * (a + b) for f in (0.3, 0.4) for a, b in zip((0, *LEVELS), (*LEVELS, 1), strict=True)
        ]
        for odds in ODDS:
            self.chance += [
                o / (1 + o) for agree in (1 / 3, 1, 3) for o in (odds * agree, 4 * odds * agree)
            ]
        self.seen = [0] * len(self.chance)

    @property
    def nbytes(self) -> int:
        return len(self.rows) * (ENTRY + self.row.itemsize)

    def put(self, keys: Sequence[int], ids: np.ndarray, scores: np.ndarray) -> None:
        """Rows (n, at most k) of n keys, best first. Of a key that stands there twice the last row
        counts.
        """
        self.note(zip(keys, self.pack(ids, scores), strict=True))

    def pack(self, ids: np.ndarray, scores: np.ndarray) -> list[bytes]:
        """What is kept of such rows."""
        block, width = np.zeros(len(ids), self.row), ids.shape[1]
        block["ids"][:, :width], block["scores"][:, :width], block["kinds"] = ids, scores, NONE
        block["kinds"][:, :width] = np.where(
            scores > 0, np.searchsorted(LEVELS, scores, "right"), NONE
        )
        flat, size = block.tobytes(), self.row.itemsize
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def note(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Keeps packed rows, (key, row), as those seen last."""
        rows = self.rows
        for key, row in entries:
            rows[key] = row
            rows.move_to_end(key)
        while len(rows) > self.capacity:
            rows.popitem(last=False)

    def look(self, before: int, token: int) -> tuple[Sequence[int], Sequence[int]]:
        """The candidates after the pair, else after the token, best first, and their classes."""
        pair = self.rows.get((before + 1) * self.vocab + token)
        if (row := self.rows.get(token) if pair is None else pair) is None:
            return (), ()
        kinds = row[8 * self.k :].rstrip(b"\xff")
        return unpack_from(self.ids, row)[: len(kinds)], kinds if pair is None else kinds.translate(
            OF_PAIR
        )

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
        if tensors.keys() != {"keys", "ids", "scores", "chance", "seen"}:
            raise ValueError(
                f"holds {', '.join(tensors)}, which are not the parts of a goose store"
            )
        size, kinds = tensors["keys"].numel(), len(self.chance)
        for name, kind, shape, high in (
            ("keys", torch.int64, (size,), (self.vocab + 1) * self.vocab - 1),
            ("seen", torch.int64, (kinds,), 64),
            ("ids", torch.int32, (size, self.k), self.vocab - 1),
            ("scores", torch.float32, (size, self.k), 1),
            ("chance", torch.float64, (kinds,), 1),
        ):
            part = tensors[name]
            if (
                part.dtype != kind
                or part.shape != shape
                or not bool(((part >= 0) & (part <= high)).all())
            ):
                raise ValueError(
                    f"{name} is not {kind} of shape {shape}, all of it between 0 and {high}"
                )
        if len(tensors["keys"].unique()) < size or bool((tensors["scores"].diff() > 0).any()):
            raise ValueError("a key stands there twice, or a row is not best first")
        self.rows.clear()
        self.put(tensors["keys"].tolist(), tensors["ids"].numpy(), tensors["scores"].numpy())
        self.chance, self.seen = tensors["chance"].tolist(), tensors["seen"].tolist()
