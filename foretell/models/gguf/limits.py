"""The header of a .gguf file, read within limits of its own before anyone else reads the file.

The readers of other packages trust it: a count beyond the end of the file keeps one of them busy
without end. Here every size is compared with what is left of the file before it is believed, so
that reading takes time and memory in proportion to the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretell.errors import BadModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST = 1 << 16  # keys, and tensors
MOST_NAME = 1 << 10  # bytes of the name of a key or a tensor
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
FORMS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")  # of numbers, by kind
ALIGNMENT = "general.alignment"


@dataclass
class Found:
    """What a header says: values by key, of a list how many it has; tensors by name with their
    sizes, the innermost first.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)


def check(path: Path) -> Found:
    """Raises BadModel where there is no file, a file of another kind, or one whose header cannot
    be: nobody else reads it then.
    """
    try:
        about = path.stat()
        return _read(path, about.st_mtime_ns, about.st_size)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadModel(f"{path}: {reason}; give the path of a .gguf file") from error
    except ValueError as error:
        raise BadModel(f"{path}: cannot be read ({error}); fetch it again") from error


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int) -> Found:
    """Raises ValueError, saying what is wrong."""
    with path.open("rb") as file:
        if not file.read(1):
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()


class _Reader:
    """Takes values off the beginning of a file."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0
        self.header_found = Found()

    def header(self) -> Found:
        if self._bytes(4) != MAGIC:
            raise ValueError("it is no GGUF file, whatever its name says")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, and this one reads 2 and 3")
        tensors, keys = self._count("tensors"), self._count("keys")
        for _ in range(keys):
            self._key()
        places = [self._tensor() for _ in range(tensors)]
        self._check_places(places)
        return self.header_found

    def _bytes(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, and its header goes on")
        self.at += size
        return self.data[self.at - size : self.at]

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]

    def _count(self, what: str) -> int:
        count = int(self._number("Q"))
        if count > MOST:
            raise ValueError(f"it says that it has {count} {what}, and {MOST} are read at most")
        return count

    def _name(self) -> str:
        size = int(self._number("Q"))
        if not 0 < size <= MOST_NAME:
            raise ValueError(f"a name of {size} bytes at byte {self.at}")
        return self._bytes(size).decode("utf-8")

    def _key(self) -> None:
        name = self._name()
        found = self.header_found
        if name in found.values or name in found.lengths:
            raise ValueError(f"it has {name} twice")
        kind = self._number("I")
        if kind == ARRAY:
            found.lengths[name] = self._list(name)
        elif kind == STRING:
            found.values[name] = self._bytes(int(self._number("Q"))).decode("utf-8", "replace")
        else:
            found.values[name] = self._number(_form(name, kind))

    def _list(self, name: str) -> int:
        kind, count = self._number("I"), int(self._number("Q"))
        size = 8 if kind == STRING else struct.calcsize(f"<{_form(name, kind)}")
        if count > (len(self.data) - self.at) // size:
            raise ValueError(f"{name} has {count} entries, and the file ends before")
        if kind != STRING:
            self.at += count * size
            return count
        unpack, at, end = struct.Struct("<Q").unpack_from, self.at, len(self.data)
        for _ in range(count):  # a vocabulary has hundreds of thousands
            at += 8 + (unpack(self.data, at)[0] if at <= end - 8 else end)
        self.at = at
        self._bytes(0)
        return count

    def _tensor(self) -> tuple[str, int, int]:
        """The name of a tensor, its format, and where it begins behind the header."""
        name, count = self._name(), self._number("I")
        if name in self.header_found.tensors:
            raise ValueError(f"it has {name} twice")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise ValueError(f"{name} has {count} dimensions")
        sizes = tuple(int(self._number("Q")) for _ in range(count))
        if not all(sizes) or math.prod(sizes) >= 1 << 62:
            raise ValueError(f"{name} is {sizes}")
        self.header_found.tensors[name] = sizes
        return name, int(self._number("I")), int(self._number("Q"))

    def _check_places(self, places: list[tuple[str, int, int]]) -> None:
        """Raises ValueError for tensors that go on behind the end of the file."""
        from gguf import GGML_QUANT_SIZES

        alignment = self.header_found.values.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{ALIGNMENT} is {alignment!r}, and no power of 2")
        begin = -(-self.at // alignment) * alignment
        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        for name, kind, offset in places:
            shape = self.header_found.tensors[name]
            block, size = sizes.get(kind, (1, 0))  # of a format that is not known here: nothing
            if shape[0] % block:
                raise ValueError(f"{name} has rows of {shape[0]}, no multiple of {block}")
            end = begin + offset + math.prod(shape) // block * size
            if offset % alignment or end > len(self.data):
                raise ValueError(f"{name} ends at byte {end} of {len(self.data)}")


def _form(name: str, kind: int) -> str:
    form = FORMS[kind] if kind < len(FORMS) else None
    if form is None:
        raise ValueError(f"{name} has values of the unknown kind {kind}")
    return form
