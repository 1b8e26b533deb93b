"""What followed each n-gram of the outputs: the best tokens with their mean probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import calcsize, pack, unpack

import numpy as np
import torch

from foretell.ops.versions import Snapshot, Table

Gram = tuple[int, ...]
Seen = Snapshot[Gram, bytes]  # the means that one request sees

ENTRY = 430  # bytes of an n-gram and its place in the table besides its row, about


class NgramMeans:
    """n-gram of 2 to `n` tokens -> its `k` best tokens, best first, with their mean probabilities.

    Shared by requests, each of which reads and learns through a snapshot of `table`. Beyond `limit`
    bytes the n-gram met longest ago is dropped. A row is packed: the number of rows that the mean
    was taken over, k token ids, k probabilities; the probabilities of other tokens count as 0.
    """

    def __init__(self, n: int, k: int, vocab: int, limit: int):
        self.n = n
        self.k = min(k, vocab)
        self.vocab = vocab
        self.layout = f"<i{self.k}i{self.k}f"
        self.entry = ENTRY + calcsize(self.layout)  # bytes
        self.table: Table[Gram, bytes] = Table(max(1, limit // self.entry))

    @property
    def nbytes(self) -> int:
        return len(self.table) * self.entry

    def find_row(self, snapshot: Seen, text: Sequence[int]) -> bytes | None:
        """The row of the longest n-gram known that ends `text`."""
        for n in range(min(self.n, len(text)), 1, -1):
            row = snapshot.get(tuple(text[-n:]))
            if row is not None:
                return row
        return None

    def learn_row(
        self, snapshot: Seen, gram: Gram, ids: Sequence[int], probs: Sequence[float]
    ) -> None:
        """Takes the target's k best tokens after `gram`, best first, into its mean."""
        snapshot.update(gram, lambda row: self._average_row(row, ids, probs))

    def _average_row(self, row: bytes | None, ids: Sequence[int], probs: Sequence[float]) -> bytes:
        if row is None:
            return pack(self.layout, 1, *ids, *probs)
        row_count, *numbers = unpack(self.layout, row)
        sums = dict(zip(numbers[: self.k], numbers[self.k :], strict=True))
        for token in sums:
            sums[token] *= row_count
        for token, prob in zip(ids, probs, strict=True):
            sums[token] = sums.get(token, 0.0) + prob
        best_tokens = sorted(sums, key=lambda token: -sums[token])[: self.k]
        means = [sums[token] / (row_count + 1) for token in best_tokens]
        return pack(self.layout, row_count + 1, *best_tokens, *means)

    def unpack_row(self, row: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (k,) int32 of a row and their mean probabilities (k,) float32."""
        ids = np.frombuffer(row, np.int32, self.k, 4)
        probs = np.frombuffer(row, np.float32, self.k, 4 + 4 * self.k)
        return ids, probs

    def tensors(self) -> dict[str, torch.Tensor]:
        """For `restore`: grams (M, n), shorter ones padded in front with -1, ids and probs (M, k),
        counts (M,).
        """
        grams = []
        packed_rows = []
        for gram, table_entry in self.table.entries.items():
            grams.append([-1] * (self.n - len(gram)) + list(gram))
            packed_rows.append(table_entry.value)
        dtype = [("count", "<i4"), ("ids", "<i4", (self.k,)), ("probs", "<f4", (self.k,))]
        row_block = np.frombuffer(b"".join(packed_rows), dtype)
        return {
            "grams": torch.tensor(grams, dtype=torch.int64).reshape(-1, self.n),
            "ids": torch.from_numpy(row_block["ids"].copy()),
            "probs": torch.from_numpy(row_block["probs"].copy()),
            "counts": torch.from_numpy(row_block["count"].copy()),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was learnt, without the oldest if they are too many. Raises
        ValueError.
        """
        self._check_tensors(tensors)
        self.table.clear()
        tensor_lists = [tensors[name].tolist() for name in ("grams", "counts", "ids", "probs")]
        for gram, row_count, ids, probs in zip(*tensor_lists, strict=True):
            gram_key = tuple(token for token in gram if token >= 0)
            self.table.write_value(gram_key, pack(self.layout, row_count, *ids, *probs))

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError unless these are tensors of such a store."""
        gram_count = tensors["grams"].numel() // self.n if "grams" in tensors else 0
        for name, dtype, shape in (
            ("grams", torch.int64, (gram_count, self.n)),
            ("ids", torch.int32, (gram_count, self.k)),
            ("probs", torch.float32, (gram_count, self.k)),
            ("counts", torch.int32, (gram_count,)),
        ):
            tensor = tensors.get(name)
            if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is missing, not {dtype} or not of shape {[*shape]}")
        grams, ids, probs = tensors["grams"], tensors["ids"], tensors["probs"]
        beyond_vocab = (grams < -1).any() | (grams >= self.vocab).any()
        padded_inside = ((grams[:, 1:] < 0) & (grams[:, :-1] >= 0)).any()
        too_short = ((grams >= 0).sum(-1) < 2).any()
        if bool(beyond_vocab | padded_inside | too_short):
            raise ValueError(
                f"grams holds what is no n-gram of a vocabulary of {self.vocab} tokens"
            )
        if len(grams.unique(dim=0)) < gram_count:
            raise ValueError("grams holds an n-gram twice")
        has_repeats = (ids.sort(-1).values.diff() == 0).any()
        if bool(has_repeats | (ids < 0).any() | (ids >= self.vocab).any()):
            raise ValueError(
                f"ids holds a token twice or one beyond the vocabulary of {self.vocab} tokens"
            )
        if not bool((probs >= 0).all() & (probs.sum(-1) < 1.001).all() & (probs[:, 0] > 0).all()):
            raise ValueError("probs are not probabilities")
        if bool((probs.diff() > 1e-6).any() | (tensors["counts"] < 1).any()):
            raise ValueError("probs are not best first, or counts are not positive")
