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

import numpy as np

from foretell.errors import BadModel
from foretell.models.gguf.plausible import check_values

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_KEYS, MOST_TENSORS = 1 << 12, 1 << 13
MOST_ENTRIES = 1 << 16  # of a list
MOST_WORDS = 1 << 21  # of a list of the tokenizer
MOST_NAME = 1 << 10  # bytes of the name of a key or a tensor
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
FORMS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")  # of numbers, by kind
ALIGNMENT = "general.alignment"
TOKENIZER = "tokenizer."  # beginning of the keys of which every letter counts
WIDEST_ALIGNMENT = 1 << 16  # bytes
LEAST_KEY, LEAST_TENSOR = 14, 33  # bytes that a key and the entry of a tensor take at least


@dataclass
class Found:
    """The contents of a header: values by key, of a list how many entries it has, of which kind
    and type, and at which byte they begin; tensors by name with their sizes, the innermost first,
    their formats, and at which byte they begin.
    """

    values: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    entry_types: dict[str, type] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)


def check_file(file_path: Path) -> Found:
    """Raises BadModel where there is no file, a file of another kind, or one whose header cannot
    be: nobody else reads it then.
    """
    try:
        file_status = file_path.stat()
        return _read_header(file_path, file_status.st_mtime_ns, file_status.st_size)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise BadModel(f"{file_path}: {reason}; give the path of a .gguf file") from error
    except ValueError as error:
        raise BadModel(f"{file_path}: cannot be read ({error}); fetch it again") from error


@lru_cache(maxsize=4)
def _read_header(file_path: Path, modified_ns: int, file_size: int) -> Found:
    """Reads a file's header. Raises ValueError, saying what is wrong."""
    with file_path.open("rb") as file:
        if not file.read(1):
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Reader(mapped).read_header()


def read_texts(file_path: Path, key_name: str) -> list[str]:
    """The texts of a list in the header. Raises BadModel where it is a list of something else, or
    one of them is no UTF-8, and KeyError where the file has no such list.
    """
    header = check_file(file_path)
    entry_count, (value_kind, start) = header.lengths[key_name], header.places[key_name]
    if value_kind != STRING:
        raise BadModel(f"{file_path}: {key_name} is no list of texts; convert the model again")
    texts: list[str] = []
    unpack_length = struct.Struct("<Q").unpack_from
    with (
        file_path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        for place in range(entry_count):
            text_end = start + 8 + unpack_length(mapped, start)[0]
            try:
                texts.append(mapped[start + 8 : text_end].decode())
            except UnicodeDecodeError:
                raise BadModel(
                    f"{file_path}: entry {place} of {key_name} is no UTF-8; fetch it again, or "
                    "convert the model again"
                ) from None
            start = text_end
    return texts


def read_numbers(file_path: Path, key_name: str) -> np.ndarray:
    """The numbers of a list in the header, (n,). Raises BadModel where it is a list of something
    else, and KeyError where the file has no such list.
    """
    header = check_file(file_path)
    entry_count, (value_kind, start) = header.lengths[key_name], header.places[key_name]
    if value_kind == STRING:
        raise BadModel(f"{file_path}: {key_name} is no list of numbers; convert the model again")
    form = f"<{_number_form(key_name, value_kind)}"
    return np.fromfile(file_path, form, entry_count, offset=start)


class _Reader:
    """Takes values off the beginning of a file."""

    def __init__(self, file_data: mmap.mmap):
        self.data = file_data
        self.at = 0
        self.header_found = Found()

    def read_header(self) -> Found:
        if self._take_bytes(4) != MAGIC:
            raise ValueError("it is no GGUF file, whatever its name says")
        version = self._take_number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            order = ", in the other order of bytes" if swapped else ""
            raise ValueError(f"its version is {version}{order}, and this one reads 2 and 3")
        tensor_count = self._take_count("tensors", MOST_TENSORS, LEAST_TENSOR)
        key_count = self._take_count("keys", MOST_KEYS, LEAST_KEY)
        for _ in range(key_count):
            self._read_key()
        tensor_places = [self._read_tensor() for _ in range(tensor_count)]
        self._check_places(tensor_places)
        header = self.header_found
        check_values(header.values, header.lengths, header.entry_types, header.tensors)
        return header

    def _take_bytes(self, byte_count: int) -> bytes:
        if byte_count > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, and its header goes on")
        self.at += byte_count
        return self.data[self.at - byte_count : self.at]

    def _take_number(self, number_form: str) -> Any:
        return struct.unpack(
            f"<{number_form}", self._take_bytes(struct.calcsize(f"<{number_form}"))
        )[0]

    def _take_count(self, counted_things: str, most: int, least_bytes: int) -> int:
        count = int(self._take_number("Q"))
        if count > most:
            raise ValueError(
                f"it says that it has {count} {counted_things}, and {most} are read at most"
            )
        if count * least_bytes > len(self.data) - self.at:
            raise ValueError(
                f"it says that it has {count} {counted_things}, and it ends before they do"
            )
        return count

    def _take_name(self) -> str:
        byte_count = int(self._take_number("Q"))
        if not 0 < byte_count <= MOST_NAME:
            raise ValueError(f"a name of {byte_count} bytes at byte {self.at}")
        name = self._take_bytes(byte_count).decode("utf-8")
        if not name.isprintable():
            raise ValueError(f"a name of other signs than letters before byte {self.at}")
        return name

    def _read_key(self) -> None:
        key_name = self._take_name()
        header = self.header_found
        if key_name in header.values or key_name in header.lengths:
            raise ValueError(f"it has {key_name} twice")
        value_kind = self._take_number("I")
        if value_kind == ARRAY:
            header.lengths[key_name] = self._skip_list(key_name)
        elif value_kind == STRING:
            header.values[key_name] = self._take_text(key_name)
        else:
            header.values[key_name] = self._take_number(_number_form(key_name, value_kind))

    def _take_text(self, key_name: str) -> str:
        text_bytes = self._take_bytes(int(self._take_number("Q")))
        if not key_name.startswith(TOKENIZER):  # what is said of a file changes nothing
            return text_bytes.decode("utf-8", "replace")
        try:
            return text_bytes.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{key_name} is no UTF-8") from None

    def _skip_list(self, key_name: str) -> int:
        value_kind, entry_count = self._take_number("I"), int(self._take_number("Q"))
        self.header_found.places[key_name] = value_kind, self.at
        entry_form = "Q" if value_kind == STRING else _number_form(key_name, value_kind)
        entry_size = struct.calcsize(f"<{entry_form}")
        if entry_count > (len(self.data) - self.at) // entry_size:
            raise ValueError(f"{key_name} has {entry_count} entries, and the file ends before")
        most = MOST_WORDS if key_name.startswith("tokenizer.") else MOST_ENTRIES
        if entry_count > most:
            raise ValueError(f"{key_name} has {entry_count} entries, and {most} are read at most")
        number = struct.unpack(f"<{entry_form}", bytes(entry_size))[0]
        self.header_found.entry_types[key_name] = str if value_kind == STRING else type(number)
        if value_kind != STRING:
            self.at += entry_count * entry_size
            return entry_count
        unpack_length, position, file_end = struct.Struct("<Q").unpack_from, self.at, len(self.data)
        for _ in range(entry_count):  # a vocabulary has hundreds of thousands
            position += 8 + (
                unpack_length(self.data, position)[0] if position <= file_end - 8 else file_end
            )
        self.at = position
        self._take_bytes(0)
        return entry_count

    def _read_tensor(self) -> tuple[str, int, int]:
        """The name of a tensor, its format, and where it begins after the header."""
        tensor_name, dimension_count = self._take_name(), self._take_number("I")
        if tensor_name in self.header_found.tensors:
            raise ValueError(f"it has {tensor_name} twice")
        if not 1 <= dimension_count <= MOST_DIMENSIONS:
            raise ValueError(f"{tensor_name} has {dimension_count} dimensions")
        sizes = tuple(int(self._take_number("Q")) for _ in range(dimension_count))
        if not all(sizes) or math.prod(sizes) >= 1 << 62:
            raise ValueError(f"{tensor_name} is {sizes}")
        self.header_found.tensors[tensor_name] = sizes
        return tensor_name, int(self._take_number("I")), int(self._take_number("Q"))

    def _check_places(self, tensor_places: list[tuple[str, int, int]]) -> None:
        """Raises ValueError for tensors that go on after the end of the file."""
        from gguf import GGML_QUANT_SIZES

        alignment = self.header_found.values.get(ALIGNMENT, 32)
        is_power = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
        if ALIGNMENT in self.header_found.lengths or not is_power or alignment > WIDEST_ALIGNMENT:
            raise ValueError(
                f"{ALIGNMENT} is {alignment!r}, and no power of 2 up to {WIDEST_ALIGNMENT}"
            )
        data_start = -(-self.at // alignment) * alignment
        sizes = {
            int(tensor_format): block_bytes
            for tensor_format, block_bytes in GGML_QUANT_SIZES.items()
        }
        end_before = data_start  # of the tensor before, which is the one that lies before
        for tensor_name, tensor_format, offset in sorted(tensor_places, key=lambda place: place[2]):
            shape = self.header_found.tensors[tensor_name]
            block_length, block_bytes = sizes.get(
                tensor_format, (1, 0)
            )  # of a format that is not known here: nothing
            if shape[0] % block_length:
                raise ValueError(
                    f"{tensor_name} has rows of {shape[0]}, no multiple of {block_length}"
                )
            end_byte = data_start + offset + math.prod(shape) // block_length * block_bytes
            if offset % alignment or end_byte > len(self.data):
                raise ValueError(f"{tensor_name} ends at byte {end_byte} of {len(self.data)}")
            self.header_found.formats[tensor_name] = tensor_format
            self.header_found.offsets[tensor_name] = data_start + offset
            if data_start + offset < end_before:
                raise ValueError(f"{tensor_name} begins at byte {data_start + offset}, in another")
            end_before = end_byte


def _number_form(key_name: str, value_kind: int) -> str:
    if value_kind == ARRAY:
        raise ValueError(f"{key_name} is a list of lists")
    number_form = FORMS[value_kind] if value_kind < len(FORMS) else None
    if number_form is None:
        raise ValueError(f"{key_name} has values of the unknown kind {value_kind}")
    return number_form
