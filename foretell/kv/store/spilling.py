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
from foretell.errors import BadConfig, BadFile, ForetellError, RequestFailed, first_line
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
        with self._writing():
            parent.mkdir(parents=True, exist_ok=True)
            clear(parent)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{MINE}{os.getpid()}-", dir=parent))
        self.path = self.folder / "rows"
        # Where nobody leaves it in order, as at the end of the process.
        self.remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def write(self, pieces: Sequence[np.ndarray]) -> list[Piece]:
        """Puts these behind what is there: uint8 (n,), each of whole words."""
        made, end = [], self.size
        for data in pieces:
            made.append(Piece(end, len(data), checksum(data)))
            end += len(data)
        left = memoryview(np.concatenate(pieces).data)
        with self._writing():
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                while left:  # the system may write a part
                    left = left[os.pwrite(file, left, end - len(left)) :]
            finally:
                os.close(file)
        self.size = end
        return made

    def read(self, piece: Piece, what: str) -> np.ndarray:
        """Uint8 (n,). `what` it is. Raises BadFile where these are not the bytes written."""
        data = np.empty(piece.size, np.uint8)
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                got = os.preadv(file, [data.data], piece.start)
            finally:
                os.close(file)
        except OSError as error:
            raise self._bad(f"{what} cannot be read ({_why(error)})") from error
        if got < piece.size:
            raise self._bad(f"{what} is damaged (it is too short)")
        if checksum(data) != piece.sum:
            raise self._bad(f"{what} is damaged (other bytes than were written)")
        return data

    def _bad(self, fault: str) -> BadFile:
        cure = "check the disk or name another folder, and send the request again"
        return BadFile(f"{self.path}: {fault}; {cure}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestFailed(
                f"{self.parent}: rows cannot be written ({_why(error)}); {self.cure}"
            ) from error


def clear(parent: Path) -> None:
    """Removes what processes of this machine left there that ended without doing so."""
    for folder in parent.glob(f"{MINE}*-*"):
        process = folder.name.removeprefix(MINE).partition("-")[0]
        if process.isdecimal() and not _runs(int(process)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def checksum(data: np.ndarray) -> tuple[int, ...]:
    """Of bytes, whole words: check sums of the sums of its rows of words, of those of its columns,
    and of the rest. About as quick as reading them; words that changed places are noticed too.
    """
    words = data.view(np.uint64)
    whole = len(words) // ROW * ROW
    rows = words[:whole].reshape(-1, ROW)
    parts = rows.sum(0, dtype=np.uint64), rows.sum(1, dtype=np.uint64), words[whole:]
    return tuple(zlib.crc32(part.data) for part in parts)


def padded(data: np.ndarray) -> np.ndarray:
    """Bytes with zeros behind them, whole words."""
    return np.concatenate([data, np.zeros(-len(data) % WORD, np.uint8)])


def checked(folder: Path, name: str) -> Path:
    """A folder that can be written into. Raises BadConfig."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadConfig(
            f"{name}={str(folder)!r}: rows cannot be written there ({_why(error)}); "
            "name another folder"
        ) from error
    return folder


def _why(error: OSError) -> str:
    return error.strerror or first_line(error)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Uint8 (n,)."""
    flat: np.ndarray = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return flat


# --- codes of stored rows


@dataclass(frozen=True)
class Files(Shelf):
    """Codes lie in folders below `folder`, which is made if it is missing; each text's has a name
    of its own. `cure`: ends the errors.
    """

    folder: Path
    cure: str

    in_memory = False

    def opened(self) -> Shelf:
        return Folder(Spill(self.folder, self.cure))


class Folder(Shelf):
    """The codes of one text and its forks."""

    in_memory = False

    def __init__(self, spill: Spill):
        self.spill = spill
        self.users = 1

    def put(self, codes: Codes) -> Codes:
        flattened = {layer: flat(code) for layer, code in codes.items()}
        pieces = self.spill.write([data for data, _ in flattened.values()])
        parts = [parts for _, parts in flattened.values()]
        filed = zip(pieces, parts, strict=True)
        return Opened(self.spill, dict(zip(flattened, filed, strict=True)))

    def share(self) -> None:
        self.users += 1

    def leave(self) -> None:
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
        whole = torch.from_numpy(self.spill.read(piece, f"what is stored of layer {layer}"))
        code = {}
        for part in parts:
            size = part.dtype.itemsize * int(np.prod(part.shape, dtype=np.int64))
            tensor = whole[part.start : part.start + size].view(part.dtype)
            code[part.name] = tensor.view(part.shape)
        return code

    def __iter__(self) -> Iterator[int]:
        return iter(self.filed)

    def __len__(self) -> int:
        return len(self.filed)


def flat(code: Code) -> tuple[np.ndarray, tuple[Part, ...]]:
    """The bytes of a code's tensors, one behind another, and which is where."""
    pieces, parts, start = [], [], 0
    for name, tensor in code.items():
        parts.append(Part(name, start, tensor.dtype, tuple(tensor.shape)))
        pieces.append(padded(_bytes(tensor)))
        start += len(pieces[-1])
    return np.concatenate(pieces), tuple(parts)


# --- blocks that are known by their slots; slots are only ever added


class BlockStore(Protocol):
    """`keys` and `values` of a layer are (KV, blocks, block, D)."""

    @property
    def bytes(self) -> int:
        """Of memory that its blocks take."""

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

    @property
    def bytes(self) -> int:
        return bytes_of(rows[:, : self.used] for pair in self.buffers for rows in pair)

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
    """In a spill inside the folder `parent`. After an error it is removed.

    Raises RequestFailed and BadFile as Spill does.
    """

    bytes = 0

    def __init__(self, parent: str):
        self.spill = Spill(Path(parent))
        self.slots: list[list[Piece]] = []  # of each its layers
        self.shapes: list[tuple[torch.Size, torch.Size]] = []  # of a block's keys and values
        self.dtype = torch.float32

    def add(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[int]:
        first, blocks = len(self.slots), keys[0].shape[1]
        pairs = [*zip(keys, values, strict=True)]
        if not first:
            self.dtype = keys[0].dtype
            self.shapes = [(k[:, 0].shape, v[:, 0].shape) for k, v in pairs]
        for block in range(blocks):
            parts = [(_bytes(k[:, block]), _bytes(v[:, block])) for k, v in pairs]
            with self._removed():
                self.slots.append(self.spill.write([padded(np.concatenate(p)) for p in parts]))
        return [*range(first, first + blocks)]

    def read(self, layer: int, slots: torch.Tensor) -> Pair:
        keys, values = (
            torch.empty(shape[0], len(slots), *shape[1:], dtype=self.dtype)
            for shape in self.shapes[layer]
        )
        sizes = [shape.numel() for shape in self.shapes[layer]]
        for place, slot in enumerate(slots.tolist()):
            with self._removed():
                raw = self.spill.read(self.slots[slot][layer], f"block {slot} of layer {layer}")
            used = raw[: sum(sizes) * self.dtype.itemsize]
            rows = torch.from_numpy(used).view(self.dtype).split(sizes)
            keys[:, place] = rows[0].view(self.shapes[layer][0])
            values[:, place] = rows[1].view(self.shapes[layer][1])
        return keys, values

    @contextlib.contextmanager
    def _removed(self) -> Iterator[None]:
        try:
            yield
        except ForetellError:
            self.spill.remove()
            raise


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

    @property
    def bytes(self) -> int:
        near = self.layers.values()
        return self.store.bytes + bytes_of(rows for one in near for rows in (one.keys, one.values))

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
    kept on the device where they lie elsewhere. Raises RequestFailed.
    """
    if not folder and device.type == "cpu":
        return RamBlocks()
    return NearBlocks(DiskBlocks(folder) if folder else RamBlocks(), near, device)
