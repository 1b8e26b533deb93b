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
from foretell.ops.attention import Bias, attend

SHARE = 4  # at most one of so many rows is kept, the last few aside
PARTS = 8  # chunks at least that a short text is cut into


@dataclass(frozen=True)
class Chunks:
    """How a text of `length` rows is cut, and how many of the chunks are kept: the first always.

    The last rows, which fill no chunk, are kept beside them.
    """

    length: int
    size: int  # rows of a chunk
    kept: int

    @classmethod
    def of(cls, length: int, budget: int, size: int) -> Chunks:
        """At most `budget` rows in chunks of `size`, smaller ones where the text is short."""
        size = max(1, min(size, length // PARTS))
        rows = min(budget, length // SHARE)
        return cls(length, size, max(1, rows // size))

    @property
    def whole(self) -> int:
        """How many there are."""
        return self.length // self.size

    def means(self, keys: torch.Tensor) -> torch.Tensor:
        """Of keys (KV, length, D) the mean of each chunk, (KV, whole, D)."""
        return keys[:, : self.whole * self.size].unflatten(1, (self.whole, self.size)).mean(2)

    def best(self, scores: torch.Tensor) -> torch.Tensor:
        """The rows (KV, n) to keep by scores (KV, whole), in ascending order."""
        scores = scores.clone()
        scores[:, :1] = torch.inf
        chunks = scores.topk(min(self.kept, self.whole), 1).indices.sort(1).values
        rows = chunks[:, :, None] * self.size + torch.arange(self.size, device=scores.device)
        rest = torch.arange(self.whole * self.size, self.length, device=scores.device)
        return torch.cat([rows.flatten(1), rest.expand(len(rows), -1)], 1)


def likeness(q: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """How near queries q (H, 1, D) are to keys (KV, chunks, D): (KV, chunks), summed over the heads
    that share keys.
    """
    queries = q.reshape(len(means), -1, q.shape[-1])
    return (queries @ means.transpose(1, 2)).sum(1)


class Selecting(Job):
    """The last token over all rows of the text, which finds those that are worth reading.

    It writes no row.
    """

    def select(self, layer: int, scores: torch.Tensor) -> None:
        """Takes note of what a layer's heads want to read, by scores (KV, chunks)."""
        self.cache.found[layer] = self.cache.chunks.best(scores)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        bias: Bias | None = None,
    ) -> torch.Tensor:
        assert window is None and bias is None, "rows of several positions are read as one"
        keys, values = self.cache.rows_beside(layer)
        self.select(layer, likeness(q, self.cache.chunks.means(keys)))
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        return attend(q, keys, values, None, scale, softcap, sinks)


class RetrievedCache(Cache):
    """Of the rows of the target's cache `beside` the chosen ones, and all that came since.

    What was computed over these rows alone is never kept: the target's own rows replace it.
    """

    beside: Cache

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        budget: int,
        chunk: int,
    ):
        super().__init__(layout, dtype, device)
        self.budget, self.chunk = budget, chunk
        self.choice: Mapping[int, torch.Tensor] | None = None  # rows (KV, n) by layer, once chosen
        self.found: dict[int, torch.Tensor] = {}  # by the running forward

    @property
    def chunks(self) -> Chunks:
        return Chunks.of(self.beside.length, self.budget, self.chunk)

    def rows_beside(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values (KV, length, D) of the target in a layer, shared rows included."""
        beside = self.beside
        parts = [(segment.k[layer], segment.v[layer]) for segment in beside.segments]
        parts.append((beside.k[layer][:, : beside.base], beside.v[layer][:, : beside.base]))
        if len(parts) == 1:
            return parts[0]
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def choose(self, choice: Mapping[int, torch.Tensor]) -> None:
        """Takes these rows of the target's, all of which it has."""
        kept = max((rows.shape[1] for rows in choice.values()), default=0)
        self.reserve(kept)
        for layer, rows in choice.items():
            keys, values = self.rows_beside(layer)
            self.k[layer][:, :kept] = keys.gather(1, rows[..., None].expand(-1, -1, keys.shape[2]))
            places = rows[..., None].expand(-1, -1, values.shape[2])
            self.v[layer][:, :kept] = values.gather(1, places)
        self.choice = choice
        self.base = kept
        self.length = self.beside.length

    def forget(self) -> None:
        super().forget()
        self.choice = None

    def sync(self, tokens: Sequence[int]) -> int:
        """As of Cache; before rows were chosen it lacks the token that is to choose them."""
        lacking = super().sync(tokens)
        return 1 if self.choice is None else lacking

    def commit(self, tokens: Sequence[int]) -> None:
        """Copies the target's rows of the tokens that came since."""
        self.beside.commit(tokens)
        self._clear_scratch()
        fresh = self.beside.length - self.length
        if self.choice is None or fresh <= 0:
            return
        self.reserve(self.base + fresh)
        new = slice(self.base, self.base + fresh)
        old = slice(self.beside.base - fresh, self.beside.base)
        for layer in range(len(self.layout)):
            self.k[layer][:, new] = self.beside.k[layer][:, old]
            self.v[layer][:, new] = self.beside.v[layer][:, old]
        self.base += fresh
        self.length += fresh

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        self.sync(tokens)
        if self.choice is not None:
            return super().prepare(ask, tokens, chunk)
        self.found = {}
        length = self.beside.length
        assert length == len(tokens) - 1, "rows are chosen of a text that the target has taken in"
        job = Selecting(self, [tokens[-1]], [length], length, seen=None, rows=[], first=0)
        return job, False

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        if self.choice is None:
            self.choose(self.found)
        else:
            super().finish(hidden)
