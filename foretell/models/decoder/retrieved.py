"""A cache that holds a part of another's rows: the chunks of a long text that are worth reading.

Of the text that the target has taken in, one token, the last, is computed over all rows, and in
each layer each key-value head keeps the chunks whose mean key its queries are nearest to. Rows of
later tokens are copied as the target computes them.

Source: Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical
Speculative Decoding" (arXiv 2404.11912), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foretell.cache.buffers import Shape
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import NO_STATES
from foretell.core.types import Ask
from foretell.ops.attention import LayerQuery

SHARE = 4  # at most one of so many rows is kept, the last few aside
PARTS = 8  # chunks at least that a short text is cut into


@dataclass(frozen=True)
class Chunks:
    """How a text of `length` rows is cut, and how many of the chunks are kept: the first always.

    The last rows, which fill no chunk, are kept beside them.
    """

    length: int
    size: int  # rows of a chunk
    kept_count: int

    @classmethod
    def of(cls, length: int, max_rows: int, chunk_size: int) -> Chunks:
        """Cuts a text into chunks of `chunk_size`, smaller ones where it is short, and keeps at
        most `max_rows` rows.
        """
        chunk_size = max(1, min(chunk_size, length // PARTS))
        kept_rows = min(max_rows, length // SHARE)
        return cls(length, chunk_size, max(1, kept_rows // chunk_size))

    @property
    def chunk_count(self) -> int:
        """The number of whole chunks."""
        return self.length // self.size

    def mean_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Mean keys (KV, whole, D) of the chunks, of keys (KV, length, D)."""
        return (
            keys[:, : self.chunk_count * self.size]
            .unflatten(1, (self.chunk_count, self.size))
            .mean(2)
        )

    def best_rows(self, scores: torch.Tensor) -> torch.Tensor:
        """The rows (KV, n) to keep by scores (KV, whole), in ascending order."""
        scores = scores.clone()
        scores[:, :1] = torch.inf
        best_chunks = scores.topk(min(self.kept_count, self.chunk_count), 1).indices.sort(1).values
        rows = best_chunks[:, :, None] * self.size + torch.arange(self.size, device=scores.device)
        rest_rows = torch.arange(self.chunk_count * self.size, self.length, device=scores.device)
        return torch.cat([rows.flatten(1), rest_rows.expand(len(rows), -1)], 1)


def score_chunks(query: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Scores (KV, chunks) by how near queries q (H, 1, D) are to keys (KV, chunks, D), summed over
    the heads that share keys.
    """
    queries = query.reshape(len(means), -1, query.shape[-1])
    return (queries @ means.transpose(1, 2)).sum(1)


class Selecting(Job):
    """The last token over all rows of the text, which finds those that are worth reading.

    It writes no row.
    """

    def select(self, layer: int, scores: torch.Tensor) -> None:
        """Takes note of what a layer's heads want to read, by scores (KV, chunks)."""
        self.cache.selected_rows[layer] = self.cache.chunks.best_rows(scores)

    def attend(self, query: LayerQuery) -> torch.Tensor:
        assert query.window is None and query.bias is None, "rows of several positions are one"
        keys, values = self.cache.rows_beside(query.layer)
        self.select(query.layer, score_chunks(query.q, self.cache.chunks.mean_keys(keys)))
        keys, values = torch.cat([keys, query.k], 1), torch.cat([values, query.v], 1)
        return query.attend(keys, values, None)


class RetrievedCache(Cache):
    """A cache of the chosen rows of the target's cache `beside`, and all that came since.

    What was computed over these rows alone is never kept: the target's own rows replace it.
    """

    beside: Cache

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        chunk_size: int,
    ):
        super().__init__(layout, dtype, device)
        self.budget, self.chunk = max_rows, chunk_size
        self.chosen_rows: Mapping[int, torch.Tensor] | None = (
            None  # rows (KV, n) by layer, once chosen
        )
        self.selected_rows: dict[int, torch.Tensor] = {}  # by the running forward

    @property
    def chunks(self) -> Chunks:
        return Chunks.of(self.beside.length, self.budget, self.chunk)

    def rows_beside(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values (KV, length, D) of the target in a layer, shared rows included."""
        target_cache = self.beside
        row_parts = [(segment.k[layer], segment.v[layer]) for segment in target_cache.segments]
        row_parts.append(
            (
                target_cache.k[layer][:, : target_cache.base],
                target_cache.v[layer][:, : target_cache.base],
            )
        )
        if len(row_parts) == 1:
            return row_parts[0]
        keys, values = zip(*row_parts, strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def choose_rows(self, chosen_rows: Mapping[int, torch.Tensor]) -> None:
        """Takes these rows of the target's, all of which it has."""
        row_count = max((rows.shape[1] for rows in chosen_rows.values()), default=0)
        self.reserve(row_count)
        for layer, rows in chosen_rows.items():
            keys, values = self.rows_beside(layer)
            self.k[layer][:, :row_count] = keys.gather(
                1, rows[..., None].expand(-1, -1, keys.shape[2])
            )
            value_rows = rows[..., None].expand(-1, -1, values.shape[2])
            self.v[layer][:, :row_count] = values.gather(1, value_rows)
        self.chosen_rows = chosen_rows
        self.base = row_count
        self.length = self.beside.length

    def forget(self) -> None:
        super().forget()
        self.chosen_rows = None

    def sync(self, tokens: Sequence[int]) -> int:
        """Counts the tokens it lacks as Cache does; before rows were chosen it lacks the token that
        is to choose them.
        """
        lacking_tokens = super().sync(tokens)
        return 1 if self.chosen_rows is None else lacking_tokens

    def commit(self, tokens: Sequence[int]) -> None:
        """Copies the target's rows of the tokens that came since."""
        self.beside.commit(tokens)
        self._clear_scratch()
        added_count = self.beside.length - self.length
        if self.chosen_rows is None or added_count <= 0:
            return
        self.reserve(self.base + added_count)
        added_slice = slice(self.base, self.base + added_count)
        source_slice = slice(self.beside.base - added_count, self.beside.base)
        for layer in range(len(self.layout)):
            self.k[layer][:, added_slice] = self.beside.k[layer][:, source_slice]
            self.v[layer][:, added_slice] = self.beside.v[layer][:, source_slice]
        self.base += added_count
        self.length += added_count

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        self.sync(tokens)
        if self.chosen_rows is not None:
            return super().prepare(ask, tokens, chunk)
        self.selected_rows = {}
        target_length = self.beside.length
        assert target_length == len(tokens) - 1, (
            "rows are chosen of a text that the target has taken in"
        )
        job = Selecting(
            self, [tokens[-1]], [target_length], target_length, seen=None, rows=[], first=0
        )
        return job, False

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        if self.chosen_rows is None:
            self.choose_rows(self.selected_rows)
        else:
            super().finish(hidden)
