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
from foretell.ops.files import whole
from foretell.ops.parsing import json_of

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
        """Of the file's data, of which those that were read are in memory."""
        return int(self.tokens.nbytes + self.suffixes.nbytes)

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """(low, high): the places suffixes[low:high] are where `pattern` (1 to DEPTH tokens) stands
        in a document.
        """
        if max(pattern) >= self.vocab:
            return 0, 0
        tokens, suffixes = self._tokens, self._suffixes
        size = len(pattern)
        wanted = list(pattern)

        def head(rank: int) -> list[int]:
            place = suffixes[rank]
            return tokens[place : place + size].tolist()

        ranks = range(len(suffixes))
        low = bisect_left(ranks, wanted, key=head)
        if low == len(ranks) or head(low) != wanted:
            return 0, 0
        return low, bisect_right(ranks, wanted, lo=low, key=head)

    def places(self, low: int, high: int, most: int) -> np.ndarray:
        """suffixes[low:high], int64; of more than `most` that many in equal distances, so that
        shares stay the same.
        """
        if high - low <= most:
            return self.suffixes[low:high].astype(np.int64)
        return self.suffixes[low + np.arange(most) * (high - low) // most].astype(np.int64)

    def check(self, vocab: int, decode: Decode | None) -> None:
        """Raises BadFile unless the ids are those of a model with `vocab` tokens and, where it is
        known, of its tokenizer.
        """
        if self.vocab > vocab:
            raise BadFile(
                f"{self.path}: holds token ids up to {self.vocab - 1} and the model's end at "
                f"{vocab - 1}; build one with the model's tokenizer: {BUILD}"
            )
        if self.mark and decode is not None and fingerprint(decode, self.vocab) != self.mark:
            raise BadFile(
                f"{self.path}: was built with another tokenizer than the model's; "
                f"build one with the model's: {BUILD}"
            )


# --- building


def order(tokens: np.ndarray, depth: int = DEPTH, tell: Tell | None = None) -> np.ndarray:
    """Positions (n,) int64 of `tokens` (n,) sorted by tokens[i : i + depth], then by i. `depth`: a
    power of two.

    Prefix doubling: positions in the order of their first w tokens are put in the order of 2w by
    the ranks of the positions w further on. Only runs of equals are sorted again.
    """
    n = len(tokens)
    base = int(tokens.max()) + 2  # digit 0: behind the end
    width = 1
    while base ** (2 * width) < 2**63 and 2 * width <= depth:
        width *= 2
    rounds = (depth // width).bit_length()
    key = np.zeros(n, np.int64)  # the first `width` tokens as one number
    for shift in range(width):
        key *= base
        key[: max(0, n - shift)] += tokens[shift:].astype(np.int64) + 1
    place = np.arange(n)  # the position in each slot of the order
    slots = np.arange(n)  # those still to be sorted
    rank = np.zeros(n, np.int64)  # of a position: the first slot of its run of equals
    for done in range(rounds):
        if tell:
            tell("sorting", done, rounds)
        here = place[slots]
        if done:
            key = rank[here] * (n + 1)
            inside = here + width < n
            key[inside] += rank[here[inside] + width] + 1
            width *= 2
        by_key = np.argsort(key, kind="stable")
        here = here[by_key]
        key = key[by_key]
        place[slots] = here
        first = np.ones(len(key), bool)  # of its run
        first[1:] = key[1:] != key[:-1]
        rank[here] = slots[np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))]
        slots = slots[~first | ~np.append(first[1:], True)]
        if not len(slots):
            break
    if tell:
        tell("sorting", rounds, rounds)
    return place


def fingerprint(decode: Decode, vocab: int) -> str:
    """Tells one tokenizer from another: the hash of the texts of some ids below `vocab`."""
    digest = hashlib.sha256()
    for token in sorted({i * vocab // SAMPLE for i in range(SAMPLE)}):  # evenly spread
        digest.update(decode([token]).encode("utf-8", "replace") + b"\0")
    return digest.hexdigest()


def build(
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
    with whole(path) as part:
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
        end = np.array([vocab], np.uint32)
        tokens = np.concatenate([ids for text in texts for ids in (text, end)])
        tokens = tokens.astype(np.uint16) if vocab < 2**16 else tokens
        suffixes = order(tokens, DEPTH, tell)
        suffixes = suffixes.astype(np.int32) if len(tokens) < 2**31 else suffixes
        about = {
            "foretell_datastore": VERSION,
            "vocab": str(vocab),
            "documents": str(len(texts)),
            "tokenizer": fingerprint(decode, vocab) if decode else "",
        }
        about["sha256"] = checksum(about, tokens, suffixes)
        save_file({"tokens": tokens, "suffixes": suffixes}, part, about)
    return load(path)


def checksum(about: dict[str, str], *arrays: np.ndarray) -> str:
    """Of what the header says, its checksum left out, and of the arrays' shapes, types and
    entries.
    """
    said = {name: value for name, value in about.items() if name != "sha256"}
    kinds = [[str(a.dtype), list(a.shape)] for a in arrays]
    digest = hashlib.sha256(json.dumps([said, kinds], sort_keys=True).encode())
    for array in arrays:
        for start in range(0, len(array), CHUNK):
            digest.update(array[start : start + CHUNK].data)
    return digest.hexdigest()


# --- opening

# (path, time, size) -> what is open: checking a large file takes a while
_opened: WeakValueDictionary[tuple[str, int, int], Datastore] = WeakValueDictionary()


def load(path: str | Path) -> Datastore:
    """Maps the file and checks all of it, unless it is open already and unchanged.

    Raises BadFile that names the file, what is wrong and the cure.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise BadFile(f"{path}: no such datastore; build one with {BUILD}")
    stat = path.stat()
    key = (str(path.resolve()), stat.st_mtime_ns, stat.st_size)
    store = _opened.get(key)
    if store is None:
        store = _opened[key] = _read(path)
    return store


def _read(path: Path) -> Datastore:
    def bad(what: str) -> BadFile:
        return BadFile(f"{path}: {what}; build it again with {BUILD}")

    try:
        with safe_open(path, "np") as opened:  # checks the header against the file's length
            about = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise bad(f"damaged, cut off or no safetensors file ({reason})") from None
    version = about.get("foretell_datastore")
    if version is None:
        raise bad("a safetensors file, but not a datastore")
    if version != VERSION:
        raise bad(f"a datastore in format {version}, and this is read: {VERSION}")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json_of(file.read(size))
    arrays = []
    for name, kinds in KINDS.items():
        entry = header.get(name, {"dtype": None})
        if entry["dtype"] not in kinds or len(entry["shape"]) != 1 or not entry["shape"][0]:
            raise bad(f"damaged: `{name}` is missing or of another kind")
        start = 8 + size + entry["data_offsets"][0]
        mapped = np.memmap(path, DTYPES[entry["dtype"]], "r", start, tuple(entry["shape"]))
        arrays.append(np.asarray(mapped))
    tokens, suffixes = arrays
    if about.get("sha256") != checksum(about, tokens, suffixes):
        raise bad("damaged: its checksum is another than when it was written")
    try:
        vocab = int(about["vocab"])
        documents = int(about["documents"])
        mark = about["tokenizer"]
    except (KeyError, ValueError):
        raise bad("damaged: its header lacks `vocab`, `documents` or `tokenizer`") from None
    # A checksum says only that the file is as it was written. Drafting must not read outside the
    # arrays, whoever wrote them.
    inside = (
        len(suffixes) == len(tokens)
        and int(suffixes.min()) >= 0
        and int(suffixes.max()) < len(tokens)
    )
    if not inside or not int(tokens.max()) == vocab == int(tokens[-1]):
        raise bad(
            "damaged: its suffixes lie outside its tokens, or its tokens outside its vocabulary"
        )
    return Datastore(path, tokens, suffixes, vocab, mark, documents)
