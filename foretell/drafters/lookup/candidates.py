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

    def put_rows(self, keys: Sequence[int], ids: np.ndarray, scores: np.ndarray) -> None:
        """Rows (n, at most k) of n keys, best first. Of a key that stands there twice the last row
        counts.
        """
        self.keep_rows(zip(keys, self.pack_rows(ids, scores), strict=True))

    def pack_rows(self, ids: np.ndarray, scores: np.ndarray) -> list[bytes]:
        """Packs rows to the bytes that are kept of them."""
        row_width = ids.shape[1]
        row_block = np.zeros(len(ids), self.row)
        row_block["ids"][:, :row_width] = ids
        row_block["scores"][:, :row_width] = scores
        row_block["kinds"] = NONE
        row_kinds = np.searchsorted(LEVELS, scores, "right")
        row_block["kinds"][:, :row_width] = np.where(scores > 0, row_kinds, NONE)
        packed_bytes = row_block.tobytes()
        row_bytes = self.row.itemsize
        return [
            packed_bytes[start : start + row_bytes]
            for start in range(0, len(packed_bytes), row_bytes)
        ]

    def keep_rows(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Keeps packed rows, (key, row), as those seen last."""
        rows = self.rows
        for key, row in entries:
            rows[key] = row
            rows.move_to_end(key)
        while len(rows) > self.capacity:
            rows.popitem(last=False)

    def candidates_after(
        self, previous_token: int, token: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The candidates after the pair, else after the token, best first, and their kinds."""
        pair_row = self.rows.get((previous_token + 1) * self.vocab + token)
        packed_row = self.rows.get(token) if pair_row is None else pair_row
        if packed_row is None:
            return (), ()
        kinds = packed_row[8 * self.k :].rstrip(b"\xff")
        ids = unpack_from(f"<{len(kinds)}i", packed_row)
        return ids, kinds if pair_row is None else kinds.translate(OF_PAIR)

    def learn_kind(self, kind: int, was_right: bool) -> None:
        self.seen[kind] = min(64, self.seen[kind] + 1)
        self.chance[kind] += (was_right - self.chance[kind]) / (4 + self.seen[kind])

    def tensors(self) -> dict[str, torch.Tensor]:
        """`keys` (n,), the one seen longest ago first, `ids` and `scores` (n, k); `chance` and
        `seen` of each class.
        """
        row_block = np.frombuffer(b"".join(self.rows.values()), self.row)
        row_arrays = {
            "ids": row_block["ids"].copy(),
            "scores": row_block["scores"].copy(),
            "keys": np.array(list(self.rows), np.int64),
            "chance": np.array(self.chance),
            "seen": np.array(self.seen),
        }
        return {name: torch.from_numpy(row_array) for name, row_array in row_arrays.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was learnt, without the oldest if they are too many. Raises
        ValueError.
        """
        if tensors.keys() != {"keys", "ids", "scores", "chance", "seen"}:
            names = ", ".join(tensors)
            raise ValueError(f"holds {names}, which are not the parts of a goose store")
        key_count, kind_count = tensors["keys"].numel(), len(self.chance)
        for name, dtype, shape, upper_bound in (
            ("keys", torch.int64, (key_count,), (self.vocab + 1) * self.vocab - 1),
            ("seen", torch.int64, (kind_count,), 64),
            ("ids", torch.int32, (key_count, self.k), self.vocab - 1),
            ("scores", torch.float32, (key_count, self.k), 1),
            ("chance", torch.float64, (kind_count,), 1),
        ):
            tensor = tensors[name]
            has_form = tensor.dtype == dtype and tensor.shape == shape
            if not has_form or not bool(((tensor >= 0) & (tensor <= upper_bound)).all()):
                raise ValueError(
                    f"{name} is not {dtype} of shape {shape}, all of it between 0 and {upper_bound}"
                )
        if len(tensors["keys"].unique()) < key_count or bool((tensors["scores"].diff() > 0).any()):
            raise ValueError("a key stands there twice, or a row is not best first")
        self.rows.clear()
        self.put_rows(tensors["keys"].tolist(), tensors["ids"].numpy(), tensors["scores"].numpy())
        self.chance = tensors["chance"].tolist()
        self.seen = tensors["seen"].tolist()


def initial_chances() -> list[float]:
    """The probability of each kind before anything was measured.

    First the kinds of candidates after a token, then after a pair, by share of the row; then those
    of a spine's token, by the length of its match, whether the candidates agree and whether its
    places do.
    """
    lower_levels, upper_levels = (0, *LEVELS), (*LEVELS, 1)
    chances = []
    for factor in (0.3, 0.4):
        chances += [
            factor * (lower + upper)
            for lower, upper in zip(lower_levels, upper_levels, strict=True)
        ]
    for spine_odds in ODDS:
        for candidates_agree in (1 / 3, 1, 3):
            for places_agree in (1, 4):
                odds = spine_odds * candidates_agree * places_agree
                chances.append(odds / (1 + odds))
    return chances
