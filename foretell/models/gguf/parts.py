"""The files that a model lies in, one or several parts, and what they hold: values of keys and
tensors, read from their places when they are asked for.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from foretell.models.gguf.limits import FORMS, STRING, Found, check_file

NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PART_KEYS = ("split.", "general.")  # beginnings of the keys that parts after the first may have
# numpy's types of the formats that are plain numbers, as the package `gguf` has them.
NUMBERS = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: `shape` with the innermost size first, and `data`, its numbers where they
    are plain, else its bytes, a row of them for each row.
    """

    name: str
    tensor_type: Any
    shape: tuple[int, ...]
    mapped: mmap.mmap  # the whole file
    offset: int

    @property
    def n_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        from gguf import GGML_QUANT_SIZES

        block_length, block_bytes = GGML_QUANT_SIZES[self.tensor_type]
        return self.n_elements // block_length * int(block_bytes)

    def release(self) -> None:
        """Takes the pages of the file that hold it out of this process's memory, where the system
        can: they are read again where anybody asks for them.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
            length = self.offset + self.nbytes - start
            self.mapped.madvise(mmap.MADV_DONTNEED, start, length)

    @cached_property
    def data(self) -> np.ndarray:
        from gguf import GGML_QUANT_SIZES

        block_length, block_bytes = GGML_QUANT_SIZES[self.tensor_type]
        stored = np.frombuffer(self.mapped, np.uint8, self.nbytes, self.offset)
        number_type = NUMBERS.get(self.tensor_type.name)
        if number_type is not None:
            return stored.view(number_type).reshape(self.shape[::-1])
        return stored.reshape(*self.shape[:0:-1], self.shape[0] // block_length * block_bytes)


class Values(Mapping[str, Any]):
    """The values of a file's keys. Lists are long, and are read when they are asked for."""

    def __init__(self, file_path: Path, found: Found):
        self.file_path, self.found = file_path, found

    def __getitem__(self, key: str) -> Any:
        if key in self.found.values:
            return self.found.values[key]
        value_kind, start = self.found.places[key]
        count = self.found.lengths[key]
        with (
            self.file_path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            if value_kind != STRING:
                return list(struct.unpack_from(f"<{count}{FORMS[value_kind]}", mapped, start))
            return list(_texts(mapped, start, count))

    def __iter__(self) -> Iterator[str]:
        yield from self.found.values
        yield from self.found.lengths

    def __len__(self) -> int:
        return len(self.found.values) + len(self.found.lengths)


def _texts(mapped: mmap.mmap, start: int, count: int) -> Iterator[str]:
    unpack_length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        end = start + 8 + unpack_length(mapped, start)[0]
        yield mapped[start + 8 : end].decode("utf-8", "replace")
        start = end


def open_parts(file_path: Path) -> tuple[Values, dict[str, Tensor]]:
    """The values and the tensors of a file, or of all parts of the model whose first part it is.

    Raises LookupError where parts are missing or belong to another model, and BadModel for one that
    cannot be.
    """
    found = check_file(file_path)
    tensors = _map_tensors(file_path, found)
    part_count = _part_count(found)
    if part_count <= 1:
        return Values(file_path, found), tensors
    for number, part_path in enumerate(_part_paths(file_path, found), 1):
        part = check_file(part_path)
        _check_part(part_path, part, number, part_count)
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise LookupError(f"{part_path.name} has {twice[0]}, which another part has too")
        tensors |= _map_tensors(part_path, part)
    stated_count = found.values.get("split.tensors.count", len(tensors))
    if stated_count != len(tensors):
        raise LookupError(
            f"its header has split.tensors.count={stated_count}, and its parts have {len(tensors)} "
            "tensors"
        )
    return Values(file_path, found), tensors


def header_sizes(file_path: Path) -> dict[Path, int]:
    """Of each part of a model that `open_parts` takes, how many bytes its header has."""
    found = check_file(file_path)
    paths = [file_path]
    if _part_count(found) > 1:
        paths += _part_paths(file_path, found)
    sizes = {}
    for path in paths:
        offsets = check_file(path).offsets.values()
        sizes[path] = min(offsets, default=path.stat().st_size)
    return sizes


def _part_count(found: Found) -> int:
    for key in ("split.count", "split.no"):
        value = found.values.get(key, 0)
        if type(value) is not int:
            raise LookupError(f"its header has {key}={value!r}, where a whole number belongs")
    return int(found.values.get("split.count", 1))


def _part_paths(file_path: Path, found: Found) -> list[Path]:
    """The other parts, all of which are there."""
    part_count, part_index = found.values["split.count"], found.values.get("split.no", 0)
    matched = NAME.fullmatch(file_path.name)
    if matched is None or int(matched["count"]) != part_count:
        raise LookupError(
            f"its header has split.count={part_count}, and its name does not end with "
            f"-{part_index + 1:05}-of-{part_count:05}.gguf"
        )
    names = [
        f"{matched['name']}-{number:05}-of-{part_count:05}.gguf"
        for number in range(1, part_count + 1)
    ]
    if part_index or int(matched["number"]) != 1:
        raise LookupError(f"it is one of {part_count} parts: give the first, {names[0]}")
    missing = [name for name in names if not file_path.with_name(name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise LookupError(
            f"it is the first of {part_count} parts, and {', '.join(missing[:3])}{more} of them "
            "are missing: put them beside it"
        )
    return [file_path.with_name(name) for name in names[1:]]


def _check_part(part_path: Path, part: Found, number: int, part_count: int) -> None:
    stated = part.values.get("split.no"), part.values.get("split.count")
    if stated != (number, part_count):
        raise LookupError(
            f"{part_path.name} has split.no={stated[0]} and split.count={stated[1]}, where "
            f"{number} and {part_count} belong"
        )
    for key in (*part.values, *part.lengths):
        if not key.startswith(PART_KEYS):
            raise LookupError(f"{part_path.name} has {key}, which belongs into the first part")


def _map_tensors(file_path: Path, found: Found) -> dict[str, Tensor]:
    from gguf import GGMLQuantizationType

    if not found.tensors:
        return {}
    with file_path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        name: Tensor(
            name,
            GGMLQuantizationType(found.formats[name]),
            shape,
            mapped,
            found.offsets[name],
        )
        for name, shape in found.tensors.items()
    }
