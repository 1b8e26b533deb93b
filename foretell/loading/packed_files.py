"""Files of packed weights in the cache folder: written once, mapped ever after.

A file is MAGIC, the length of its header (8 bytes, little-endian), the header's SHA-256, the header
(JSON), and from the next page on the numbers of its tensors, each at a multiple of 64 bytes. It is
written beside its place and put there whole. Of what was read the least recently is removed where
all of them together exceed the limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.errors import BadConfig, BadFile
from foretell.native.arena import rounded_size
from foretell.ops.files import cache_folder, replace_file
from foretell.ops.parsing import parse_json

VARIABLE = "FORETELL_PACKED_GB"  # names the limit in GB; 0: nothing is kept
MOST_BYTES = 20_000_000_000
SHARE = 4  # at most one in so many bytes that the disk has left
END = ".packed"
MAGIC = b"FTPACK\x00\x01"
LEAD = len(MAGIC) + 8 + 32  # bytes before the header
LONGEST_HEADER = 64 << 20
SAMPLE = 4096  # bytes at a time that a digest reads
SAMPLES = 64  # of a source, evenly spread
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}


@dataclass
class Contents:
    """What a file holds: `model` says what the `tensors` are, which lie in the mapped file. What is
    written to them stays in this process.
    """

    model: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def packed_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "packed"


def most_bytes() -> int:
    """The limit of all files together. Raises BadConfig for a variable that is no number."""
    stated = os.environ.get(VARIABLE)
    if stated:
        try:
            gigabytes = float(stated)
        except ValueError:
            gigabytes = -1.0
        if not 0 <= gigabytes < math.inf:
            raise BadConfig.field(VARIABLE, stated, "a number of GB, 0 or more")
        return int(gigabytes * 1e9)
    existing = packed_folder()
    while not existing.exists():
        existing = existing.parent
    try:
        free_bytes = shutil.disk_usage(existing).free
    except OSError:
        return 0
    return min(MOST_BYTES, (free_bytes + held_bytes()) // SHARE)


def held_bytes() -> int:
    """Bytes of all files."""
    return sum(size for _, size, _ in _list_files())


def _list_files() -> list[tuple[float, int, Path]]:
    """When each file was last used, its size and its path, the least recently used first."""
    found = []
    with contextlib.suppress(OSError):
        for path in packed_folder().iterdir():
            with contextlib.suppress(OSError):  # removed just now
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
    return sorted(found)


def clean() -> int:
    """Removes all files; returns how many bytes they had. Raises BadFile."""
    removed_bytes = 0
    for _, size, path in _list_files():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise BadFile(
                f"{path}: cannot be removed ({error.strerror}); remove it by hand"
            ) from error
        removed_bytes += size
    return removed_bytes


def source_digest(header_sizes: Mapping[Path, int], *details: str) -> str:
    """A digest of files, by which what was made of them is found again.

    It reads a file's size and the times of its last changes, of its contents and of its entry,
    which nobody can set back; its header, which says what lies where; and SAMPLES pieces of the
    rest, so that a system of files whose times are wrong does not pass unnoticed. `header_sizes`:
    of each file, the bytes of its header. Raises OSError.
    """
    digest = hashlib.sha256(json.dumps(details).encode())
    for path, stated_size in sorted(header_sizes.items()):
        status = path.stat()
        times = status.st_size, status.st_mtime_ns, status.st_ctime_ns
        digest.update(json.dumps([path.name, *times]).encode())
        with path.open("rb") as file:
            header_size = min(stated_size, status.st_size)
            digest.update(file.read(header_size))
            rest = max(0, status.st_size - header_size - SAMPLE)
            for place in range(SAMPLES + 1):
                file.seek(header_size + rest * place // SAMPLES)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


# --- written


def write(name: str, model: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Keeps tensors, in their order, under a name. Raises BadFile where they cannot be written, and
    where they are more than the limit.
    """
    folder = packed_folder()
    entries: dict[str, Any] = {}
    offset = 0
    for tensor_name, tensor in tensors.items():
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        raw = _bytes_of(tensor)
        entries[tensor_name] = {
            "dtype": dtype_name,
            "shape": list(tensor.shape),
            "offset": offset,
            "sample": _sample(raw),
        }
        offset += rounded_size(len(raw))
    header = json.dumps({"name": name, "bytes": offset, "model": model, "tensors": entries})
    header_bytes = header.encode()
    start = _page_end(LEAD + len(header_bytes))
    limit = most_bytes()
    if start + offset > limit:
        raise BadFile(
            f"{folder}: {(start + offset) / 1e9:.1f} GB are more than the limit of "
            f"{limit / 1e9:.1f} GB; {VARIABLE} names another one, and 0 keeps nothing"
        )
    _make_room(limit - start - offset)
    cure = f"free some space, or {VARIABLE}=0"
    with replace_file(folder / name, cure) as part, part.open("wb") as file:
        lead = MAGIC + struct.pack("<Q", len(header_bytes))
        file.write(lead + hashlib.sha256(header_bytes).digest() + header_bytes)
        file.seek(start)
        for tensor in tensors.values():
            raw = _bytes_of(tensor)
            file.write(raw.numpy().data)
            file.seek(rounded_size(len(raw)) - len(raw), os.SEEK_CUR)
        file.truncate(start + offset)
        file.flush()
        os.fsync(file.fileno())


def _make_room(left_bytes: int) -> None:
    """Removes files, the least recently used first, until no more than so many bytes are held."""
    files = _list_files()
    held = sum(size for _, size, _ in files)
    for _, size, path in files:
        if held <= left_bytes:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            held -= size


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, uint8 (n,)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sample(raw: torch.Tensor) -> str:
    """A digest of the first and the last bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (raw[:SAMPLE], raw[-SAMPLE:]):
        digest.update(part.numpy().data)
    return digest.hexdigest()


def _page_end(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


# --- read


def read(name: str) -> Contents | None:
    """What is kept under a name; None: nothing. Raises BadFile for a damaged file."""
    path = packed_folder() / name
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, start = _read_header(name, file, size)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)
        with contextlib.suppress(OSError):  # a folder that is read-only
            os.utime(path)
    except (FileNotFoundError, PermissionError):  # of another user, for one
        return None
    except OSError as error:
        raise damage(name, error.strerror or "it cannot be read") from error
    try:
        if header["name"] != name or header["bytes"] + start != size:
            raise damage(name, "it is not as long as it says, or another file")
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        tensors = {
            tensor_name: _map_tensor(name, whole, start, entry)
            for tensor_name, entry in header["tensors"].items()
        }
        return Contents(dict(header["model"]), tensors)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise damage(name, "its header says what cannot be") from error


def _read_header(name: str, file: Any, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    lead = file.read(LEAD)
    if len(lead) < LEAD or not lead.startswith(MAGIC):
        raise damage(name, "it begins otherwise")
    (header_size,) = struct.unpack_from("<Q", lead, len(MAGIC))
    if header_size > min(LONGEST_HEADER, size - LEAD):
        raise damage(name, "it is cut off")
    header_bytes = file.read(header_size)
    if hashlib.sha256(header_bytes).digest() != lead[-32:]:
        raise damage(name, "its header is not what was written")
    try:
        header = parse_json(header_bytes)
    except ValueError as error:
        raise damage(name, "its header cannot be read") from error
    return header, _page_end(LEAD + header_size)


def _map_tensor(
    name: str, whole: torch.Tensor, start: int, entry: Mapping[str, Any]
) -> torch.Tensor:
    dtype, shape, offset = DTYPES[entry["dtype"]], entry["shape"], entry["offset"]
    size = math.prod(shape) * dtype.itemsize
    if min([offset, *shape]) < 0 or offset % 64 or start + offset + size > len(whole):
        raise damage(name, "a tensor lies outside")
    raw = whole[start + offset : start + offset + size]
    if _sample(raw) != entry["sample"]:
        raise damage(name, "numbers are not what was written")
    return raw.view(dtype).view(shape)


def damage(name: str, reason: str) -> BadFile:
    """The error of a file that is not what was written."""
    return BadFile(f"{packed_folder() / name}: damaged ({reason}); remove it")
