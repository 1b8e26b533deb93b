"""Codes in files: a folder for each text, which is removed with it.

A file has what was put on the shelf at one time, raw bytes without a header: what they are is kept
in memory, and so is a sum of each part, which is checked whenever the part is read. Nothing is
mapped: a read part takes memory for as long as it is used.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from foretell.errors import BadConfig, BadFile, RequestFailed, first_line
from foretell.ops.storing import Code, Codes, Shelf

WORD = 8  # bytes that parts and tensors are padded to


@dataclass(frozen=True)
class Files(Shelf):
    """Codes lie in folders below `folder`, which is made if it is missing; each text's has a name
    of its own. `cure`: ends the errors.
    """

    folder: Path
    cure: str

    in_memory = False

    def opened(self) -> Shelf:
        return Folder(self)


class Folder(Shelf):
    """The codes of one text and its forks. Raises RequestFailed where the system refuses it."""

    in_memory = False

    def __init__(self, files: Files):
        self.files = files
        self.users = 1
        self.written = 0
        with self._refused():
            files.folder.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="foretell-", dir=files.folder))
        # Where nobody leaves it in order, as at the end of the process.
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def put(self, codes: Codes) -> Codes:
        path = self.path / f"{self.written}.rows"
        self.written += 1
        filed = {}
        with self._refused(), path.open("wb") as file:
            for layer, code in codes.items():
                data, parts = flat(code)
                filed[layer] = Filed(path, file.tell(), len(data), checksum(data), parts)
                file.write(data.data)
        return Opened(filed)

    def share(self) -> None:
        self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self.remove()

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or first_line(error)
            raise RequestFailed(
                f"{self.files.folder}: rows cannot be written ({why}); {self.files.cure}"
            ) from error


@dataclass(frozen=True)
class Part:
    """A tensor in a part of a file."""

    name: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Filed:
    """The code of one layer."""

    path: Path
    start: int
    size: int
    sum: int
    parts: tuple[Part, ...]

    def read(self) -> Code:
        """Raises BadFile where these are not the bytes that were written."""
        try:
            data = np.fromfile(self.path, np.uint8, self.size, offset=self.start)
        except OSError as error:
            raise self._damaged(error.strerror or first_line(error)) from error
        if len(data) < self.size:
            raise self._damaged("it is too short")
        if checksum(data) != self.sum:
            raise self._damaged("other bytes than were written")
        whole = torch.from_numpy(data)
        code = {}
        for part in self.parts:
            size = part.dtype.itemsize * int(np.prod(part.shape, dtype=np.int64))
            tensor = whole[part.start : part.start + size].view(part.dtype)
            code[part.name] = tensor.view(part.shape)
        return code

    def _damaged(self, why: str) -> BadFile:
        return BadFile(f"{self.path}: stored rows are damaged ({why}); send the request again")


class Opened(Mapping[int, Code]):
    """Codes that are read from their file whenever they are asked for."""

    def __init__(self, filed: Mapping[int, Filed]):
        self.filed = filed

    def __getitem__(self, layer: int) -> Code:
        return self.filed[layer].read()

    def __iter__(self) -> Iterator[int]:
        return iter(self.filed)

    def __len__(self) -> int:
        return len(self.filed)


def flat(code: Code) -> tuple[np.ndarray, tuple[Part, ...]]:
    """The bytes of a code's tensors, one behind another, and which is where."""
    pieces, parts, start = [], [], 0
    for name, tensor in code.items():
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        parts.append(Part(name, start, tensor.dtype, tuple(tensor.shape)))
        pieces += [data, np.zeros(-len(data) % WORD, np.uint8)]
        start += len(data) + len(pieces[-1])
    return np.concatenate(pieces), tuple(parts)


def checksum(data: np.ndarray) -> int:
    """The sum of its words, and their parities: as quick as reading them, and other wherever a few
    words are.
    """
    words = data.view(np.uint64)
    total = int(words.sum(dtype=np.uint64))
    return total << 64 | int(np.bitwise_xor.reduce(words, initial=np.uint64(0)))


def checked(folder: Path, name: str) -> Path:
    """A folder that can be written into. Raises BadConfig."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = error.strerror or first_line(error)
        raise BadConfig(
            f"{name}={str(folder)!r}: rows cannot be written there ({why}); name another folder"
        ) from error
    return folder
