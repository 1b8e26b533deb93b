"""Texts as tokens with the order of their suffixes: where in a large corpus did these tokens stand?

One safetensors file, mapped into memory when it is opened. `tokens` holds the documents one after
another, each followed by the id `vocab`, which no document has, so that nothing is continued into
the next one. `suffixes` holds the positions of all tokens, sorted by the text that begins there.
The order looks at DEPTH tokens; where these are equal the earlier position comes first. A file is
refused unless all of it is as it was written. A fingerprint of the tokenizer says what its ids
mean, so that it is not used with another one.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from foretell.errors import BadConfig, BadFile
from foretell.ops.files import replace_file
from foretell.ops.parsing import parse_json

VERSION = "1"
DEPTH = 64  # tokens that the order looks at; a power of two
CHUNK = 1 << 20  # entries read at once when a file is checked
SAMPLE = 256  # ids in a fingerprint
BUILD = "foretell datastore TEXT... --tokenizer MODEL --out FILE.safetensors"
KINDS = {"tokens": ("U16", "U32"), "suffixes": ("I32", "I64")}
DTYPES = {"U16": np.uint16, "U32": np.uint32, "I32": np.int32, "I64": np.int64}

Tell = Callable[[str, int, "int | None"], None]  # (what, done, total or None)
Decode = Callable[[Sequence[int]], str]


class Datastore:
    """An open file, which is only read.

    `tokens` (n,), unsigned; `suffixes` (n,), signed; ids of documents are below `vocab`; `mark`:
    the tokenizer's fingerprint, empty if it is not known.
    """

    def __init__(
        self,
        path: Path,
        tokens: np.ndarray,
        suffixes: np.ndarray,
        vocab: int,
        mark: str,
        documents: int,
    ):
        self.path = path
        self.tokens = tokens
        self.suffixes = suffixes
        self.vocab = vocab
        self.mark = mark
        self.documents = documents
        # Single entries are read faster from memory views than from arrays.
        self._tokens = tokens.data
        self._suffixes = suffixes.data

    def __deepcopy__(self, memo: dict[int, Any]) -> Datastore:
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the file's data, of which those that were read are in memory."""
        return int(self.tokens.nbytes + self.suffixes.nbytes)

    def find_ranks(self, pattern: Sequence[int]) -> tuple[int, int]:
        """(low, high): the places suffixes[low:high] are where `pattern` (1 to DEPTH tokens) stands
        in a document.
        """
        if max(pattern) >= self.vocab:
            return 0, 0
        tokens, suffixes = self._tokens, self._suffixes
        pattern_length = len(pattern)
        pattern_tokens = list(pattern)

        def leading_tokens(rank: int) -> list[int]:
            position = suffixes[rank]
            return tokens[position : position + pattern_length].tolist()

        ranks = range(len(suffixes))
        first_rank = bisect_left(ranks, pattern_tokens, key=leading_tokens)
        if first_rank == len(ranks) or leading_tokens(first_rank) != pattern_tokens:
            return 0, 0
        return first_rank, bisect_right(ranks, pattern_tokens, lo=first_rank, key=leading_tokens)

    def places(self, first_rank: int, end_rank: int, max_places: int) -> np.ndarray:
        """suffixes[low:high], int64; of more than `max_places` that many in equal distances, so
        that shares stay the same.
        """
        if end_rank - first_rank <= max_places:
            return self.suffixes[first_rank:end_rank].astype(np.int64)
        return self.suffixes[
            first_rank + np.arange(max_places) * (end_rank - first_rank) // max_places
        ].astype(np.int64)

    def check_model(self, vocab: int, decode: Decode | None) -> None:
        """Raises BadFile unless the ids are those of a model with `vocab` tokens and, where it is
        known, of its tokenizer.
        """
        if self.vocab > vocab:
            raise BadFile(
                f"{self.path}: holds token ids up to {self.vocab - 1} and the model's end at "
                f"{vocab - 1}; build one with the model's tokenizer: {BUILD}"
            )
        if self.mark and decode is not None and tokenizer_mark(decode, self.vocab) != self.mark:
            raise BadFile(
                f"{self.path}: was built with another tokenizer than the model's; "
                f"build one with the model's: {BUILD}"
            )


# --- building


def sort_suffixes(tokens: np.ndarray, depth: int = DEPTH, tell: Tell | None = None) -> np.ndarray:
    """Positions (n,) int64 of `tokens` (n,) sorted by tokens[i : i + depth], then by i. `depth`: a
    power of two.

    Prefix doubling: positions in the order of their first w tokens are put in the order of 2w by
    the ranks of the positions w further on. Only runs of equals are sorted again.
    """
    n = len(tokens)
    base = int(tokens.max()) + 2  # digit 0: after the end
    sorted_width = 1
    while base ** (2 * sorted_width) < 2**63 and 2 * sorted_width <= depth:
        sorted_width *= 2
    round_count = (depth // sorted_width).bit_length()
    sort_keys = np.zeros(n, np.int64)  # the first `width` tokens as one number
    for shift in range(sorted_width):
        sort_keys *= base
        sort_keys[: max(0, n - shift)] += tokens[shift:].astype(np.int64) + 1
    positions = np.arange(n)  # the position in each slot of the order
    open_slots = np.arange(n)  # those still to be sorted
    run_ranks = np.zeros(n, np.int64)  # of a position: the first slot of its run of equals
    for round_number in range(round_count):
        if tell:
            tell("sorting", round_number, round_count)
        active_positions = positions[open_slots]
        if round_number:
            sort_keys = run_ranks[active_positions] * (n + 1)
            is_inside = active_positions + sorted_width < n
            sort_keys[is_inside] += run_ranks[active_positions[is_inside] + sorted_width] + 1
            sorted_width *= 2
        key_order = np.argsort(sort_keys, kind="stable")
        active_positions = active_positions[key_order]
        sort_keys = sort_keys[key_order]
        positions[open_slots] = active_positions
        starts_run = np.ones(len(sort_keys), bool)  # of its run
        starts_run[1:] = sort_keys[1:] != sort_keys[:-1]
        run_ranks[active_positions] = open_slots[
            np.maximum.accumulate(np.where(starts_run, np.arange(len(sort_keys)), 0))
        ]
        open_slots = open_slots[~starts_run | ~np.append(starts_run[1:], True)]
        if not len(open_slots):
            break
    if tell:
        tell("sorting", round_count, round_count)
    return positions


def tokenizer_mark(decode: Decode, vocab: int) -> str:
    """Tells one tokenizer from another: the hash of the texts of some ids below `vocab`."""
    digest = hashlib.sha256()
    for token in sorted({i * vocab // SAMPLE for i in range(SAMPLE)}):  # evenly spread
        digest.update(decode([token]).encode("utf-8", "replace") + b"\0")
    return digest.hexdigest()


def build_datastore(
    path: Path,
    documents: Iterable[Sequence[int]],
    decode: Decode | None = None,
    tell: Tell | None = None,
) -> Datastore:
    """Writes the file, whole or not at all, and opens it.

    `decode` is the tokenizer's; a file that is built without it fits any. Raises BadConfig where
    there are no tokens, BadFile where the file cannot be written.
    """
    if path.is_dir():
        raise BadConfig(f"{path}: is a folder; give the name of a file")
    with replace_file(path) as partial_path:
        texts: list[np.ndarray] = []
        for ids in documents:
            if len(ids):
                texts.append(np.array(ids, np.uint32))
            if tell:
                tell("reading", len(texts), None)
        if not texts:
            raise BadConfig(
                f"{path}: the texts have no tokens; name a folder or file that holds some"
            )
        vocab = 1 + max(int(text.max()) for text in texts)
        end_marker = np.array([vocab], np.uint32)
        tokens = np.concatenate([ids for text in texts for ids in (text, end_marker)])
        tokens = tokens.astype(np.uint16) if vocab < 2**16 else tokens
        suffixes = sort_suffixes(tokens, DEPTH, tell)
        suffixes = suffixes.astype(np.int32) if len(tokens) < 2**31 else suffixes
        metadata = {
            "foretell_datastore": VERSION,
            "vocab": str(vocab),
            "documents": str(len(texts)),
            "tokenizer": tokenizer_mark(decode, vocab) if decode else "",
        }
        metadata["sha256"] = content_checksum(metadata, tokens, suffixes)
        save_file({"tokens": tokens, "suffixes": suffixes}, partial_path, metadata)
    return load_datastore(path)


def content_checksum(metadata: dict[str, str], *arrays: np.ndarray) -> str:
    """The SHA-256 of what the header says, its checksum left out, and of the arrays' shapes, types
    and entries.
    """
    checked_entries = {name: value for name, value in metadata.items() if name != "sha256"}
    array_kinds = [[str(a.dtype), list(a.shape)] for a in arrays]
    digest = hashlib.sha256(json.dumps([checked_entries, array_kinds], sort_keys=True).encode())
    for array in arrays:
        for start in range(0, len(array), CHUNK):
            digest.update(array[start : start + CHUNK].data)
    return digest.hexdigest()


# --- opening

# (path, time, size) -> what is open: checking a large file takes a while
_open_stores: WeakValueDictionary[tuple[str, int, int], Datastore] = WeakValueDictionary()


def load_datastore(path: str | Path) -> Datastore:
    """Maps the file and checks all of it, unless it is open already and unchanged.

    Raises BadFile that names the file, what is wrong and the cure.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise BadFile(f"{path}: no such datastore; build one with {BUILD}")
    file_stat = path.stat()
    file_key = (str(path.resolve()), file_stat.st_mtime_ns, file_stat.st_size)
    store = _open_stores.get(file_key)
    if store is None:
        store = _open_stores[file_key] = _read_datastore(path)
    return store


def _read_datastore(path: Path) -> Datastore:
    def damaged_file(problem: str) -> BadFile:
        return BadFile(f"{path}: {problem}; build it again with {BUILD}")

    try:
        with safe_open(path, "np") as header_file:  # checks the header against the file's length
            metadata = header_file.metadata() or {}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise damaged_file(f"damaged, cut off or no safetensors file ({reason})") from None
    version = metadata.get("foretell_datastore")
    if version is None:
        raise damaged_file("a safetensors file, but not a datastore")
    if version != VERSION:
        raise damaged_file(f"a datastore in format {version}, and this is read: {VERSION}")
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(header_size))
    arrays = []
    for name, allowed_dtypes in KINDS.items():
        array_entry = header.get(name, {"dtype": None})
        if (
            array_entry["dtype"] not in allowed_dtypes
            or len(array_entry["shape"]) != 1
            or not array_entry["shape"][0]
        ):
            raise damaged_file(f"damaged: `{name}` is missing or of another kind")
        data_start = 8 + header_size + array_entry["data_offsets"][0]
        mapped = np.memmap(
            path, DTYPES[array_entry["dtype"]], "r", data_start, tuple(array_entry["shape"])
        )
        arrays.append(np.asarray(mapped))
    tokens, suffixes = arrays
    if metadata.get("sha256") != content_checksum(metadata, tokens, suffixes):
        raise damaged_file("damaged: its checksum is another than when it was written")
    try:
        vocab = int(metadata["vocab"])
        documents = int(metadata["documents"])
        mark = metadata["tokenizer"]
    except (KeyError, ValueError):
        raise damaged_file(
            "damaged: its header lacks `vocab`, `documents` or `tokenizer`"
        ) from None
    # A checksum says only that the file is as it was written. Drafting must not read outside the
    # arrays, whoever wrote them.
    suffixes_fit = (
        len(suffixes) == len(tokens)
        and int(suffixes.min()) >= 0
        and int(suffixes.max()) < len(tokens)
    )
    if not suffixes_fit or not int(tokens.max()) == vocab == int(tokens[-1]):
        raise damaged_file(
            "damaged: its suffixes lie outside its tokens, or its tokens outside its vocabulary"
        )
    return Datastore(path, tokens, suffixes, vocab, mark, documents)
