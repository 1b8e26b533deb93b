"""Which tokens a draft model's head keeps: the most frequent ones, as many as pay, and their file.

Of all sizes k the best one maximises alpha * C(k) + (1 - alpha) * R(k). C is the share of counted
tokens that the k most frequent ones cover, R the share of a forward's products that the smaller
head saves, in which each token left out counts the same. So a token is worth keeping exactly if its
share of the counts is above (1 - alpha) / alpha times its share of the forward: no search is
needed. Tokens that must stay, ends of texts and special ones, come first.

Source: "Balancing Coverage and Draft Latency in Vocabulary Trimming for Faster Speculative
Decoding" (arXiv 2603.05210), which searches by TPE what has this closed form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.drafters.lookup.datastore import tokenizer_mark
from foretell.errors import BadConfig, BadFile
from foretell.ops.files import write_text
from foretell.ops.parsing import parse_json

VERSION = 1
SHARES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)  # rows of the table of coverage
BUILD = "foretell trim TEXT... --model MODEL --draft MODEL --out FILE.json"
Decode = Callable[[Sequence[int]], str]


def counts_of(texts: Iterable[Sequence[int]], vocab: int) -> np.ndarray:
    """How often each of `vocab` tokens stands in these texts, (V,)."""
    counts = np.zeros(vocab, np.int64)
    for ids in texts:
        counts += np.bincount(np.asarray(ids, np.int64), minlength=vocab)[:vocab]
    return counts


class Ranking:
    """All tokens in the order in which they are kept, and what the first k of them are worth.

    `counts` (V,); `always`: ids that are kept in any case; `row_share`: what one token's row takes
    of the draft model's forward. Raises BadConfig where nothing was counted.
    """

    def __init__(self, counts: np.ndarray, always: Iterable[int], row_share: float):
        self.vocab = len(counts)
        self.total = int(counts.sum())
        if not self.total:
            raise BadConfig("the texts have no tokens; give some that have")
        self.unseen = float((counts == 1).sum()) / self.total  # of further text (Good and Turing)
        self.row_share = row_share
        is_forced = np.zeros(self.vocab, bool)
        is_forced[sorted({*always})] = True
        self.least = int(is_forced.sum())  # tokens at least
        self.order = np.lexsort((np.arange(self.vocab), -counts, ~is_forced))
        self.shares = counts[self.order] / self.total
        covered_counts = np.cumsum(counts[self.order])
        self.covered = np.concatenate(([0], covered_counts)) / self.total

    def token_coverage(self, size: int) -> float:
        """The share of the counted tokens that stand among the first `size`."""
        return float(self.covered[size])

    def saved_share(self, size: int) -> float:
        """The share of a forward's products that a head of this size saves."""
        return (self.vocab - size) * self.row_share

    def size_utility(self, size: int, alpha: float) -> float:
        return alpha * self.token_coverage(size) + (1 - alpha) * self.saved_share(size)

    def size_reaching(self, coverage: float) -> int:
        """The smallest size that covers this share."""
        covers_enough = self.covered >= min(coverage, 1.0)
        covers_enough[-1] = True
        return max(self.least, 1, int(np.argmax(covers_enough)))

    def best_size(self, alpha: float, coverage: float = 0.0) -> int:
        """The smallest of the sizes of most utility among those that cover `coverage`.

        Raises BadConfig for an alpha outside its range.
        """
        if not 0 < alpha <= 1:
            raise BadConfig.field("alpha", alpha, "above 0 and at most 1")
        threshold = (1 - alpha) / alpha * self.row_share
        paying_count = int(np.count_nonzero(self.shares[self.least :] > threshold))
        return max(self.least + paying_count, self.size_reaching(coverage))

    def kept_tokens(self, size: int) -> list[int]:
        """The first `size` tokens, in ascending order."""
        return [int(token) for token in np.sort(self.order[:size])]

    def size_table(self, alpha: float, *sizes: int) -> list[dict[str, float]]:
        """Coverage, savings and utility of these sizes and of those that reach SHARES."""
        table_rows = []
        for size in sorted({*sizes, *map(self.size_reaching, SHARES), self.vocab}):
            table_row = {
                "size": size,
                "coverage": self.token_coverage(size),
                "saved": self.saved_share(size),
            }
            table_rows.append(table_row | {"utility": self.size_utility(size, alpha)})
        return table_rows


# --- the file


@dataclass(frozen=True)
class Kept:
    """A file's tokens: `ids` in ascending order, of a vocabulary of `vocab`; `mark`: the
    fingerprint of its tokenizer, empty if it is not known.
    """

    path: Path
    ids: tuple[int, ...]
    vocab: int
    mark: str

    def check_model(self, vocab: int, decode: Decode | None) -> None:
        """Raises BadFile unless the ids are those of a model with `vocab` tokens and, where it is
        known, of its tokenizer.
        """
        if self.ids[-1] >= vocab:
            raise BadFile(
                f"{self.path}: keeps token {self.ids[-1]} and the model's end at {vocab - 1}; "
                f"build one for this model: {BUILD}"
            )
        if self.mark and decode is not None and tokenizer_mark(decode, self.vocab) != self.mark:
            raise BadFile(
                f"{self.path}: was built with another tokenizer than the model's; "
                f"build one with the model's: {BUILD}"
            )


def save_kept_tokens(
    path: Path,
    ids: Sequence[int],
    vocab: int,
    decode: Decode | None,
    table: Sequence[dict[str, float]],
) -> None:
    """Writes the file, whole or not at all. Raises BadFile where it cannot be written."""
    document: dict[str, Any] = {
        "foretell_kept_tokens": VERSION,
        "vocab": vocab,
        "tokenizer": tokenizer_mark(decode, vocab) if decode else "",
        "table": list(table),
        "ids": list(ids),
    }
    write_text(path, json.dumps(document) + "\n")


def load_kept_tokens(path: str | Path) -> Kept:
    """Reads the file. Raises BadFile that names the file, what is wrong and the cure."""
    path = Path(path).expanduser()

    def damaged_file(problem: str) -> BadFile:
        return BadFile(f"{path}: {problem}; build it again with {BUILD}")

    if not path.is_file():
        raise BadFile(f"{path}: no such file of kept tokens; build one with {BUILD}")
    try:
        document = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise damaged_file("cannot be read, or is no JSON") from None
    if not isinstance(document, dict) or "foretell_kept_tokens" not in document:
        raise damaged_file("a JSON file, but none of kept tokens")
    version = document["foretell_kept_tokens"]
    if version != VERSION:
        raise damaged_file(f"kept tokens in format {version!r}, and this is read: {VERSION}")
    ids, vocab, mark = (document.get(name) for name in ("ids", "vocab", "tokenizer"))
    are_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not are_ids or not ids or type(vocab) is not int or not isinstance(mark, str):
        raise damaged_file(
            "damaged: its ids, vocabulary or tokenizer are missing or of another kind"
        )
    if ids != sorted({*ids}) or not 0 <= ids[0] <= ids[-1] < vocab:
        raise damaged_file("damaged: its ids are not in order, or outside its vocabulary")
    return Kept(path, tuple(ids), vocab, mark)
