"""Rows that lie outside a model's memory: in RAM, or in files that are removed with their text.

    Spill       bytes in a file of a folder of its own, each piece checked whenever it is read
    Files       where the codes of stored rows lie (storing.py): a spill for each text and its forks
    DiskBlocks  blocks of rows that are known by their slots, in a spill; RamBlocks in memory, and
                NearBlocks near the model those of a slower store that were read last

What was written never changes, and what it is stands in memory, so a file has no header. Nothing is
mapped: what is read takes memory of the process for as long as it is used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from foretell.cache.buffers import bytes_of
from foretell.errors import BadConfig, BadFile, ForetellError, RequestFailed, first_message_line
from foretell.kv.store.base import Code, Codes, Shelf

# Folders of rows: a folder may be shared by machines, and numbers of processes are each one's own.
MINE = f"foretell-{socket.gethostname()}-"
WORD = 8  # bytes that pieces and tensors are padded to
ROW = 512  # words that are summed up together
FIRST_SLOTS = 16
SPACE = "free some space or name another folder"
Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


class Piece(NamedTuple):
    """Bytes in a spill."""

    start: int
    size: int
    sum: tuple[int, ...]


class Spill:
    """A file that grows, in a folder of its own below `parent`, which is made if it is missing.

    `cure`: ends the errors. Raises RequestFailed where the system refuses to write.
    """

    def __init__(self, parent: Path, cure: str = SPACE):
        self.parent, self.cure = parent, cure
        self.size = 0
        with self._report_errors():
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale(parent)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{MINE}{os.getpid()}-", dir=parent))
        self.path = self.folder / "rows"
        # Where nobody leaves it in order, as at the end of the process.
        self.remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def write_pieces(self, pieces: Sequence[np.ndarray]) -> list[Piece]:
        """Puts these after what is there: uint8 (n,), each of whole words."""
        written_pieces, file_end = [], self.size
        for data in pieces:
            written_pieces.append(Piece(file_end, len(data), word_checksums(data)))
            file_end += len(data)
        remaining_bytes = memoryview(np.concatenate(pieces).data)
        with self._report_errors():
            file_handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                while remaining_bytes:  # the system may write a part
                    remaining_bytes = remaining_bytes[
                        os.pwrite(file_handle, remaining_bytes, file_end - len(remaining_bytes)) :
                    ]
            finally:
                os.close(file_handle)
        self.size = file_end
        return written_pieces

    def read_piece(self, piece: Piece, content_name: str) -> np.ndarray:
        """Reads a piece's bytes, uint8 (n,). `content_name`: what they are, for errors. Raises
        BadFile where these are not the bytes written.
        """
        data = np.empty(piece.size, np.uint8)
        try:
            file_handle = os.open(self.path, os.O_RDONLY)
            try:
                read_bytes = os.preadv(file_handle, [data.data], piece.start)
            finally:
                os.close(file_handle)
        except OSError as error:
            raise self._damage_error(
                f"{content_name} cannot be read ({_reason_of(error)})"
            ) from error
        if read_bytes < piece.size:
            raise self._damage_error(f"{content_name} is damaged (it is too short)")
        if word_checksums(data) != piece.sum:
            raise self._damage_error(f"{content_name} is damaged (other bytes than were written)")
        return data

    def _damage_error(self, fault: str) -> BadFile:
        cure = "check the disk or name another folder, and send the request again"
        return BadFile(f"{self.path}: {fault}; {cure}")

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestFailed(
                f"{self.parent}: rows cannot be written ({_reason_of(error)}); {self.cure}"
            ) from error


def remove_stale(parent: Path) -> None:
    """Removes what processes of this machine left there that ended without doing so."""
    for folder in parent.glob(f"{MINE}*-*"):
        process_id = folder.name.removeprefix(MINE).partition("-")[0]
        if process_id.isdecimal() and not _process_runs(int(process_id)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays


def _process_runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def word_checksums(data: np.ndarray) -> tuple[int, ...]:
    """Check sums of bytes, whole words: of the sums of their rows of words, of those of their
    columns, and of the rest. About as quick as reading them; words that changed places are noticed
    too.
    """
    words = data.view(np.uint64)
    full_words = len(words) // ROW * ROW
    rows = words[:full_words].reshape(-1, ROW)
    word_sums = rows.sum(0, dtype=np.uint64), rows.sum(1, dtype=np.uint64), words[full_words:]
    return tuple(zlib.crc32(part.data) for part in word_sums)


def pad_words(data: np.ndarray) -> np.ndarray:
    """Bytes with zeros after them, whole words."""
    return np.concatenate([data, np.zeros(-len(data) % WORD, np.uint8)])


def writable_folder(folder: Path, name: str) -> Path:
    """A folder that can be written into. Raises BadConfig."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadConfig(
            f"{name}={str(folder)!r}: rows cannot be written there ({_reason_of(error)}); "
            "name another folder"
        ) from error
    return folder


def _reason_of(error: OSError) -> str:
    return error.strerror or first_message_line(error)


def _tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Uint8 (n,)."""
    flat_bytes: np.ndarray = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return flat_bytes


# --- codes of stored rows


@dataclass(frozen=True)
class Files(Shelf):
    """Codes lie in folders below `folder`, which is made if it is missing; each text's has a name
    of its own. `cure`: ends the errors.
    """

    folder: Path
    cure: str

    in_memory = False

    def open_shelf(self) -> Shelf:
        return Folder(Spill(self.folder, self.cure))


class Folder(Shelf):
    """The codes of one text and its forks."""

    in_memory = False

    def __init__(self, spill: Spill):
        self.spill = spill
        self.users = 1

    def put_codes(self, codes: Codes) -> Codes:
        flat_codes = {layer: flatten_code(code) for layer, code in codes.items()}
        pieces = self.spill.write_pieces([data for data, _ in flat_codes.values()])
        parts = [parts for _, parts in flat_codes.values()]
        filed_codes = zip(pieces, parts, strict=True)
        return Opened(self.spill, dict(zip(flat_codes, filed_codes, strict=True)))

    def add_user(self) -> None:
        self.users += 1

    def remove_user(self) -> None:
        self.users -= 1
        if not self.users:
            self.spill.remove()


@dataclass(frozen=True)
class Part:
    """A tensor in a piece."""

    name: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Opened(Mapping[int, Code]):
    """Codes that are read from their file whenever they are asked for."""

    def __init__(self, spill: Spill, filed: Mapping[int, tuple[Piece, tuple[Part, ...]]]):
        self.spill, self.filed = spill, filed

    def __getitem__(self, layer: int) -> Code:
        piece, parts = self.filed[layer]
        piece_bytes = torch.from_numpy(
            self.spill.read_piece(piece, f"what is stored of layer {layer}")
        )
        code = {}
        for part in parts:
            tensor_bytes = part.dtype.itemsize * int(np.prod(part.shape, dtype=np.int64))
            tensor = piece_bytes[part.start : part.start + tensor_bytes].view(part.dtype)
            code[part.name] = tensor.view(part.shape)
        return code

    def __iter__(self) -> Iterator[int]:
        return iter(self.filed)

    def __len__(self) -> int:
        return len(self.filed)


def flatten_code(code: Code) -> tuple[np.ndarray, tuple[Part, ...]]:
    """The bytes of a code's tensors, one after another, and which is where."""
    pieces, parts, start = [], [], 0
    for name, tensor in code.items():
        parts.append(Part(name, start, tensor.dtype, tuple(tensor.shape)))
        pieces.append(pad_words(_tensor_bytes(tensor)))
        start += len(pieces[-1])
    return np.concatenate(pieces), tuple(parts)


# --- blocks that are known by their slots; slots are only ever added


class BlockStore(Protocol):
    """`keys` and `values` of a layer are (KV, blocks, block, D)."""

    @property
    def bytes(self) -> int:
        """Bytes of memory that its blocks take."""

    def add_blocks(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        """Takes blocks of all layers in; their slots."""

    def read_blocks(self, layer: int, slots: torch.Tensor) -> Pair:
        """The rows of a layer that lie in these slots (n,), in their order."""


class RamBlocks:
    """Blocks in memory, in buffers that grow by doubling."""

    def __init__(self) -> None:
        self.used = 0
        self.capacity = 0
        self.buffers: list[Pair] = []

    @property
    def bytes(self) -> int:
        return bytes_of(rows[:, : self.used] for pair in self.buffers for rows in pair)

    def add_blocks(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        start, end = self.used, self.used + keys[0].shape[1]
        if end > self.capacity:
            self._grow_buffers(max(FIRST_SLOTS, end, 2 * self.capacity), keys, values)
        for (own_keys, own_values), new_keys, new_values in zip(
            self.buffers, keys, values, strict=True
        ):
            own_keys[:, start:end] = new_keys
            own_values[:, start:end] = new_values
        self.used = end
        return [*range(start, end)]

    def _grow_buffers(
        self, slot_count: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        self.capacity = slot_count
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            longer_rows = [
                torch.empty(
                    new_rows.shape[0], slot_count, *new_rows.shape[2:], dtype=new_rows.dtype
                )
                for new_rows in pair
            ]
            if self.used:
                for longer_buffer, old_buffer in zip(longer_rows, self.buffers[layer], strict=True):
                    longer_buffer[:, : self.used] = old_buffer[:, : self.used]
                self.buffers[layer] = (longer_rows[0], longer_rows[1])
            else:
                self.buffers.append((longer_rows[0], longer_rows[1]))

    def read_blocks(self, layer: int, slots: torch.Tensor) -> Pair:
        keys, values = self.buffers[layer]
        slot_indices = slots.cpu()
        return keys.index_select(1, slot_indices), values.index_select(1, slot_indices)


class DiskBlocks:
    """Blocks in a spill inside the folder `parent`. After an error it is removed.

    Raises RequestFailed and BadFile as Spill does.
    """

    bytes = 0

    def __init__(self, parent: str):
        self.spill = Spill(Path(parent))
        self.slots: list[list[Piece]] = []  # of each its layers
        self.shapes: list[tuple[torch.Size, torch.Size]] = []  # of a block's keys and values
        self.dtype = torch.float32

    def add_blocks(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        first_slot, block_count = len(self.slots), keys[0].shape[1]
        layer_pairs = [*zip(keys, values, strict=True)]
        if not first_slot:
            self.dtype = keys[0].dtype
            self.shapes = [(k[:, 0].shape, v[:, 0].shape) for k, v in layer_pairs]
        for block in range(block_count):
            layer_bytes = [
                (_tensor_bytes(k[:, block]), _tensor_bytes(v[:, block])) for k, v in layer_pairs
            ]
            with self._remove_on_error():
                self.slots.append(
                    self.spill.write_pieces([pad_words(np.concatenate(p)) for p in layer_bytes])
                )
        return [*range(first_slot, first_slot + block_count)]

    def read_blocks(self, layer: int, slots: torch.Tensor) -> Pair:
        keys, values = (
            torch.empty(shape[0], len(slots), *shape[1:], dtype=self.dtype)
            for shape in self.shapes[layer]
        )
        row_sizes = [shape.numel() for shape in self.shapes[layer]]
        for slot_index, slot in enumerate(slots.tolist()):
            with self._remove_on_error():
                block_bytes = self.spill.read_piece(
                    self.slots[slot][layer], f"block {slot} of layer {layer}"
                )
            used_bytes = block_bytes[: sum(row_sizes) * self.dtype.itemsize]
            block_rows = torch.from_numpy(used_bytes).view(self.dtype).split(row_sizes)
            keys[:, slot_index] = block_rows[0].view(self.shapes[layer][0])
            values[:, slot_index] = block_rows[1].view(self.shapes[layer][1])
        return keys, values

    @contextlib.contextmanager
    def _remove_on_error(self) -> Iterator[None]:
        try:
            yield
        except ForetellError:
            self.spill.remove()
            raise


@dataclass(eq=False)
class _Near:
    """Rows of a layer that were read last, `owner` the slots they are of (-1: none)."""

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

    @property
    def bytes(self) -> int:
        near_layers = self.layers.values()
        return self.store.bytes + bytes_of(
            rows for near_layer in near_layers for rows in (near_layer.keys, near_layer.values)
        )

    def add_blocks(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        slots = self.store.add_blocks([k.cpu() for k in keys], [v.cpu() for v in values])
        self.slots = slots[-1] + 1
        return slots

    def read_blocks(self, layer: int, slots: torch.Tensor) -> Pair:
        if len(slots) > self.count:
            return self._read_far(layer, slots)
        near_layer = self.layers.get(layer)
        if near_layer is None:
            keys, values = self._read_far(layer, slots[:1])
            no_owner = torch.full((self.count,), -1, device=self.device)
            empty_rows = [
                row_part.new_empty(row_part.shape[0], self.count, *row_part.shape[2:])
                for row_part in (keys, values)
            ]
            near_layer = _Near(
                empty_rows[0], empty_rows[1], no_owner, no_owner.clone(), no_owner[:0]
            )
            self.layers[layer] = near_layer
        if len(near_layer.table) < self.slots:
            missing_slots = near_layer.table.new_full((2 * self.slots - len(near_layer.table),), -1)
            near_layer.table = torch.cat([near_layer.table, missing_slots])
        near_layer.clock += 1
        near_places = near_layer.table[slots]
        missing_mask = near_places < 0
        if bool(missing_mask.any()):
            near_layer.used[near_places[~missing_mask]] = near_layer.clock
            new_slots = slots[missing_mask]
            freed_places = near_layer.used.argsort()[
                : len(new_slots)
            ]  # those that were read longest ago
            evicted_slots = near_layer.owner[freed_places]
            near_layer.table[evicted_slots[evicted_slots >= 0]] = -1
            near_layer.keys[:, freed_places], near_layer.values[:, freed_places] = self._read_far(
                layer, new_slots
            )
            near_layer.owner[freed_places], near_layer.table[new_slots] = new_slots, freed_places
            near_places = near_layer.table[slots]
        near_layer.used[near_places] = near_layer.clock
        return near_layer.keys.index_select(1, near_places), near_layer.values.index_select(
            1, near_places
        )

    def _read_far(self, layer: int, slots: torch.Tensor) -> Pair:
        keys, values = self.store.read_blocks(layer, slots)
        return keys.to(self.device), values.to(self.device)


def blocks_in(folder: str, near_count: int, device: torch.device) -> BlockStore:
    """A new store in a folder of its own in this one, "": in RAM; `near_count` blocks of each layer
    are kept on the device where they lie elsewhere. Raises RequestFailed.
    """
    if not folder and device.type == "cpu":
        return RamBlocks()
    return NearBlocks(DiskBlocks(folder) if folder else RamBlocks(), near_count, device)
