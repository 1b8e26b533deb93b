"""Blocks of cache rows that lie outside a model's memory: in RAM, or in a file.

A block has the rows of all layers and is known by its slot. Slots are only ever added, and what
lies in one never changes; so copies of a cache share a store.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from foretell.errors import BadFile

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values
FIRST_SLOTS = 16


class BlockStore(Protocol):
    """`keys` and `values` of a layer are (KV, blocks, block, D)."""

    def add(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        """Takes blocks of all layers in; their slots."""

    def read(self, layer: int, slots: torch.Tensor) -> Pair:
        """The rows of a layer that lie in these slots (n,), in their order."""


class RamBlocks:
    """In memory, in buffers that grow by doubling."""

    def __init__(self) -> None:
        self.used = 0
        self.capacity = 0
        self.buffers: list[Pair] = []

    def add(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        start, end = self.used, self.used + keys[0].shape[1]
        if end > self.capacity:
            self._grow(max(FIRST_SLOTS, end, 2 * self.capacity), keys, values)
        for (own_keys, own_values), new_keys, new_values in zip(
            self.buffers, keys, values, strict=True
        ):
            own_keys[:, start:end] = new_keys
            own_values[:, start:end] = new_values
        self.used = end
        return [*range(start, end)]

    def _grow(
        self, slots: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        self.capacity = slots
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            longer = [
                torch.empty(new.shape[0], slots, *new.shape[2:], dtype=new.dtype) for new in pair
            ]
            if self.used:
                for made, had in zip(longer, self.buffers[layer], strict=True):
                    made[:, : self.used] = had[:, : self.used]
                self.buffers[layer] = (longer[0], longer[1])
            else:
                self.buffers.append((longer[0], longer[1]))

    def read(self, layer: int, slots: torch.Tensor) -> Pair:
        keys, values = self.buffers[layer]
        at = slots.cpu()
        return keys.index_select(1, at), values.index_select(1, at)


class DiskBlocks:
    """In a file in a folder of its own inside `parent`, which is removed with the store.

    Raises BadFile where nothing can be written, and where what is read is not what was written;
    the folder is removed then. The file is read, not mapped: its pages are not the process's.
    """

    def __init__(self, parent: str):
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="foretell-blocks-", dir=parent))
        except OSError as error:
            raise BadFile(f"{parent}: {_unwritten(error)}") from error
        self.path = self.folder / "blocks"
        try:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise BadFile(f"{self.path}: {_unwritten(error)}") from error
        self.close = weakref.finalize(self, _remove, self.file, self.folder)
        self.starts: list[int] = []  # of each layer, its place in a slot
        self.size = 0  # bytes of a slot
        self.sums: list[list[int]] = []  # of each slot, the check sums of its layers
        self.shapes: list[tuple[torch.Size, torch.Size]] = []  # of a block's keys and values
        self.dtype = torch.float32

    def add(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        blocks = keys[0].shape[1]
        first = len(self.sums)
        if not first:
            self._lay_out(keys, values)
        for block in range(blocks):
            parts = [
                b"".join(_bytes(rows[:, block]) for rows in pair)
                for pair in zip(keys, values, strict=True)
            ]
            self._write(b"".join(parts), len(self.sums) * self.size)
            self.sums.append([zlib.crc32(part) for part in parts])
        return [*range(first, first + blocks)]

    def _lay_out(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.dtype = keys[0].dtype
        for pair in zip(keys, values, strict=True):
            self.starts.append(self.size)
            self.shapes.append((pair[0][:, 0].shape, pair[1][:, 0].shape))
            self.size += sum(rows[:, 0].numel() * rows.element_size() for rows in pair)

    def _write(self, data: bytes, place: int) -> None:
        left = memoryview(data)
        try:
            while left:
                written = os.pwrite(self.file, left, place)
                left, place = left[written:], place + written
        except OSError as error:
            self.close()
            raise BadFile(f"{self.path}: {_unwritten(error)}") from error

    def read(self, layer: int, slots: torch.Tensor) -> Pair:
        keys, values = (
            torch.empty(shape[0], len(slots), *shape[1:], dtype=self.dtype)
            for shape in self.shapes[layer]
        )
        end = self.starts[layer + 1] if layer + 1 < len(self.starts) else self.size
        raw = torch.empty(end - self.starts[layer], dtype=torch.uint8)
        split = keys[:, 0].numel() * keys.element_size()
        for place, slot in enumerate(slots.tolist()):
            self._read(raw, slot, layer)
            keys[:, place] = raw[:split].view(self.dtype).view(self.shapes[layer][0])
            values[:, place] = raw[split:].view(self.dtype).view(self.shapes[layer][1])
        return keys, values

    def _read(self, raw: torch.Tensor, slot: int, layer: int) -> None:
        buffer = raw.numpy().data
        try:
            got = os.preadv(self.file, [buffer], slot * self.size + self.starts[layer])
            fault = "is damaged" if got < len(buffer) else ""
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        if not fault and zlib.crc32(buffer) != self.sums[slot][layer]:
            fault = "is damaged"
        if fault:
            self.close()
            raise BadFile(
                f"{self.path}: block {slot} of layer {layer} {fault}; "
                "check the disk or name another folder, and ask again"
            )


@dataclass(eq=False)
class _Near:
    """Of a layer: rows that were read last, `owner` the slots they are of (-1: none)."""

    keys: torch.Tensor
    values: torch.Tensor
    owner: torch.Tensor
    used: torch.Tensor  # when each was read last
    table: torch.Tensor  # of each slot its place here, -1: it is not here
    clock: int = 0


class NearBlocks:
    """Keeps `count` blocks of each layer near the model, those that were read last, of a store that
    is slow to read.
    """

    def __init__(self, store: BlockStore, count: int, device: torch.device):
        self.store, self.count, self.device = store, count, device
        self.slots = 0
        self.layers: dict[int, _Near] = {}

    def add(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        slots = self.store.add([k.cpu() for k in keys], [v.cpu() for v in values])
        self.slots = slots[-1] + 1
        return slots

    def read(self, layer: int, slots: torch.Tensor) -> Pair:
        if len(slots) > self.count:
            return self._far(layer, slots)
        near = self.layers.get(layer)
        if near is None:
            keys, values = self._far(layer, slots[:1])
            none = torch.full((self.count,), -1, device=self.device)
            rows = [
                part.new_empty(part.shape[0], self.count, *part.shape[2:])
                for part in (keys, values)
            ]
            near = _Near(rows[0], rows[1], none, none.clone(), none[:0])
            self.layers[layer] = near
        if len(near.table) < self.slots:
            more = near.table.new_full((2 * self.slots - len(near.table),), -1)
            near.table = torch.cat([near.table, more])
        near.clock += 1
        at = near.table[slots]
        missing = at < 0
        if bool(missing.any()):
            near.used[at[~missing]] = near.clock
            new = slots[missing]
            places = near.used.argsort()[: len(new)]  # those that were read longest ago
            given_up = near.owner[places]
            near.table[given_up[given_up >= 0]] = -1
            near.keys[:, places], near.values[:, places] = self._far(layer, new)
            near.owner[places], near.table[new] = new, places
            at = near.table[slots]
        near.used[at] = near.clock
        return near.keys.index_select(1, at), near.values.index_select(1, at)

    def _far(self, layer: int, slots: torch.Tensor) -> Pair:
        keys, values = self.store.read(layer, slots)
        return keys.to(self.device), values.to(self.device)


def blocks_in(folder: str, near: int, device: torch.device) -> BlockStore:
    """A new store in a folder of its own in this one, "": in RAM; `near` blocks of each layer are
    kept on the device where they lie elsewhere. Raises BadFile.
    """
    if not folder and device.type == "cpu":
        return RamBlocks()
    return NearBlocks(DiskBlocks(folder) if folder else RamBlocks(), near, device)


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def _unwritten(error: OSError) -> str:
    return f"cannot be written ({error.strerror}); free some space or name another folder"


def _remove(file: int, folder: Path) -> None:
    os.close(file)
    shutil.rmtree(folder, ignore_errors=True)
