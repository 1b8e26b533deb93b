"""The memory of a cache: keys and values of its rows, grown by an eighth, shared until written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from foretell.ops.logits import zero_memory

Shape = tuple[int, int, int]  # of a layer: key-value heads, width of a key, width of a value
Layout = tuple[Shape, ...]
SPARE = 8  # buffers have room for one further row for every so many
ROUND = 64  # rows that their length is a multiple of


def row_bytes(layout: Sequence[Shape | None], dtype: torch.dtype) -> int:
    """Bytes of the rows of one token in all layers."""
    numbers = sum(shape[0] * (shape[1] + shape[2]) for shape in layout if shape)
    return numbers * dtype.itemsize


def bytes_of(row_tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the numbers of all these tensors."""
    return sum(tensor.nbytes for tensor in row_tensors)


def roomy_length(rows: int) -> int:
    """The length of buffers that hold at least so many rows, with some to spare."""
    return -(-(rows + rows // SPARE) // ROUND) * ROUND


class Rows:
    """Keys and values (KV, capacity, D) of every layer; layers of one shape lie in one tensor.

    Backends with memory of their own override `_allocate`, which sets `keys` and `values`.
    """

    any_length = True  # whether buffers are of the length they are asked for
    first_rows = 1  # that its buffers begin with, where nobody says how many
    guest: object = (
        None  # who else has rows after the committed ones, until room is made: ops/viewed
    )

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        capacity: int | None = None,
    ):
        self.layout = tuple(layout)  # None: a layer that keeps no rows
        self.dtype = dtype
        self.device = device
        self.capacity = self.first_rows if capacity is None else capacity
        self.shapes = sorted({shape for shape in layout if shape is not None})
        self.sharers = [1]  # how many caches use these buffers; a writer copies unless alone
        self._allocate()

    def _allocate(self) -> None:
        self.keys, self.values = [], []
        for shape in self.shapes:
            size = (self.layout.count(shape), shape[0], self.capacity)
            self.keys.append(zero_memory((*size, shape[1]), self.dtype, self.device))
            self.values.append(zero_memory((*size, shape[2]), self.dtype, self.device))
        self._name_layers()

    def _name_layers(self) -> None:
        """Sets `k` and `v`: of each layer its part of the buffers."""
        self.k: list[Any] = []
        self.v: list[Any] = []
        for layer, shape in enumerate(self.layout):
            shape_index = -1 if shape is None else self.shapes.index(shape)
            layer_index = self.layout[:layer].count(shape)
            self.k.append(None if shape is None else self.keys[shape_index][layer_index])
            self.v.append(None if shape is None else self.values[shape_index][layer_index])

    def begin_buffers(self, rows: int) -> None:
        """Gives an empty cache buffers of exactly this length."""
        self.keys, self.values, self.k, self.v = [], [], [], []
        self.capacity = rows
        self._allocate()

    def grow_buffers(self, rows: int, used_rows: int) -> None:
        """Makes the buffers this cache's alone and at least `rows` long; keeps the first
        `used_rows`.
        """
        self.guest = None
        if rows <= self.capacity and self.sharers[0] == 1:
            return
        if rows > self.capacity:
            self.capacity = self.next_length(rows)
        old_buffers = (*self.keys, *self.values)
        self.sharers[0] -= 1
        self.sharers = [1]
        self._allocate()
        for new_rows, old_rows in zip((*self.keys, *self.values), old_buffers, strict=True):
            new_rows[:, :, :used_rows] = old_rows[:, :, :used_rows]

    def next_length(self, rows: int) -> int:
        """The next length of buffers that have to hold so many rows. Backends whose memory comes
        in sizes of their own override it.
        """
        return roomy_length(rows)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the cache's buffers, or its part of those that it shares."""
        return bytes_of((*self.keys, *self.values)) // max(1, self.sharers[0])

    def move_rows(self, sources: Sequence[int], target: int) -> None:
        """Copies these rows to `target` and after it. The buffers must be this cache's alone."""
        source_rows = torch.tensor(list(sources), dtype=torch.long, device=self.device)
        target_range = slice(target, target + len(source_rows))
        for buffer in (*self.keys, *self.values):
            buffer[:, :, target_range] = buffer[:, :, source_rows]

    def gather_rows(self, surviving_rows: Sequence[torch.Tensor | None]) -> None:
        """Keeps of each layer these rows of its heads (KV, n), in their order, as its first n.
        The buffers must be this cache's alone.
        """
        for layer, layer_rows in enumerate(surviving_rows):
            if layer_rows is None:
                continue
            for buffer in (self.k[layer], self.v[layer]):
                row_indices = layer_rows[..., None].expand(-1, -1, buffer.shape[-1])
                buffer[:, : layer_rows.shape[1]] = buffer.gather(1, row_indices)

    def drop(self) -> None:
        """Lets go of the buffers: the others that share them need not copy on its account."""
        self.sharers[0] -= 1
