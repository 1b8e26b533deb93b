"""Rows of a cache by the sentences of their text: which tokens end one, and what stands in each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from foretell.core.tokenizer_bytes import Words, words_of
from foretell.errors import Unsupported
from foretell.ops.row_attention import Listed, highest

if TYPE_CHECKING:
    from foretell.core.model import Model

# Full stops, perhaps with what closes a quotation behind them, and empty lines.
END = re.compile(r"\s*[.!?。！？…]+[\"'”’»)\]]*\s*|[ \t\r]*\n[ \t\r]*\n\s*")  # noqa: RUF001
OPEN = 0  # in place of a sentence's number: of rows in none that has ended


def sentence_ends(target: Model, method: str) -> frozenset[int]:
    """The ids whose text is an end of a sentence and nothing else. Raises Unsupported where there
    is no tokenizer to tell, or it has no such tokens.
    """
    ends = _ends(words_of(target, method))
    if not ends:
        need = "a tokenizer with tokens that end a sentence"
        raise Unsupported.missing(method, target.name, need, "leave kv out")
    return ends


@lru_cache(maxsize=8)
def _ends(words: Words) -> frozenset[int]:
    texts = (piece.decode("utf-8", "replace") if piece else "" for piece in words.pieces)
    return frozenset(token for token, text in enumerate(texts) if END.fullmatch(text))


@dataclass(frozen=True)
class Path:
    """Where a new node stands: scratch rows are numbered from 0 behind the committed ones."""

    rows: tuple[int, ...]  # scratch rows on its path, its own the last
    ends: tuple[int, ...]  # of them those above it that end a sentence

    @property
    def running(self) -> tuple[int, ...]:
        """The rows of its own sentence."""
        if not self.ends:
            return self.rows
        return self.rows[self.rows.index(self.ends[-1]) + 1 :]


@dataclass(frozen=True)
class Node:
    """Where a node stands, and what it reads anyway or does not see, see `Share.hidden`."""

    path: Path
    hidden: torch.Tensor | None


def paths(
    tokens: Sequence[int], parents: Sequence[int], first: int, ends: frozenset[int]
) -> list[Path]:
    """Of scratch rows, those from `first` on; `parents`: -1 is the committed text."""
    found: list[Path] = []
    for row, parent in enumerate(parents):
        above = found[parent] if parent >= 0 else Path((), ())
        ended = parent >= 0 and tokens[parent] in ends
        found.append(Path((*above.rows, row), (*above.ends, parent) if ended else above.ends))
    return found[first:]


@dataclass(frozen=True, eq=False)
class Index:
    """The sentences of a layer's rows."""

    of: torch.Tensor  # (KV, rows): the number of each row's sentence, from 1 on, or OPEN
    means: torch.Tensor  # (KV, S, D): the mean key of each sentence, in float32 or wider

    @classmethod
    def of_places(cls, keys: torch.Tensor, places: torch.Tensor, ends: Sequence[int]) -> Index:
        """Of keys (KV, n, D) that stand at these places of a text (KV, n), which has tokens that
        end a sentence at `ends`, ascending. A sentence without rows has mean 0.
        """
        heads, _, width = keys.shape
        last = torch.tensor(list(ends), dtype=torch.long, device=keys.device)
        of = torch.searchsorted(last, places.contiguous())  # from 0 on
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        sums = wide.new_zeros(heads, len(ends) + 1, width)
        sums = sums.scatter_add(1, of[..., None].expand_as(wide), wide)
        counts = sums.new_zeros(sums.shape[:2]).scatter_add(1, of, sums.new_ones(of.shape))
        return cls(of + 1, sums / counts.clamp(min=1)[..., None])

    def closed(self, keys: torch.Tensor, rows: Sequence[int]) -> Index:
        """The same with these rows, ascending, as one more sentence; `keys` (KV, any, D) of all
        rows.
        """
        more = max(0, rows[-1] + 1 - self.of.shape[1])
        of = torch.nn.functional.pad(self.of, (0, more), value=OPEN)
        chosen = torch.tensor(list(rows), device=keys.device)
        mean = keys[:, chosen].to(self.means.dtype).mean(1, keepdim=True)
        number = self.means.shape[1] + 1
        return Index(of.index_fill(1, chosen, number), torch.cat([self.means, mean], 1))

    def above(self, keys: torch.Tensor, path: Path, begun: range) -> Index:
        """The same with the sentences that a node's path ended, behind the committed rows `begun`
        that stand in none.
        """
        index, rows = self, list(begun)
        for row in path.rows[:-1]:
            rows.append(begun.stop + row)
            if row in path.ends:
                index, rows = index.closed(keys, rows), []
        return index

    def given(self, asked: torch.Tensor, rows: int) -> torch.Tensor:
        """What a query (KV, D) gives to the first so many rows by their sentences (KV, rows): the
        products with the sentences' mean keys, and less to rows in none.
        """
        products = (asked[:, None] @ self.means.transpose(1, 2))[:, 0]
        nothing = torch.finfo(products.dtype).min
        given = torch.nn.functional.pad(products, (1, 0), value=nothing).gather(
            1, self.of[:, :rows]
        )
        return torch.nn.functional.pad(given, (0, rows - given.shape[1]), value=nothing)


@dataclass(frozen=True)
class Share:
    """How many rows a query reads: the first ones, the last ones, `room` of those between them."""

    sinks: int = 0
    recent: int = 1
    room: int = 1

    def hidden(self, base: int, path: Path, rows: int, device: torch.device) -> torch.Tensor | None:
        """Which of so many rows a node reads anyway, or does not see, bool (rows,): it sees `base`
        committed rows and its path. None: there is room for all that it sees.
        """
        end = base + len(path.rows) - self.recent
        hidden = torch.ones(rows, dtype=torch.bool)
        hidden[self.sinks : min(base, max(0, end))] = False
        for row in path.rows[max(0, self.sinks - base) : max(0, end - base)]:
            hidden[base + row] = False
        return hidden.to(device) if rows - int(hidden.sum()) > self.room else None

    def nodes(
        self, found: Sequence[Path], base: int, rows: int, device: torch.device
    ) -> list[Node]:
        """The nodes that stand there, of a cache with so many rows, `base` of them committed."""
        return [Node(path, self.hidden(base, path, rows, device)) for path in found]

    def read(self, given: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What a node reads, bool (KV, rows): the `hidden` rows, and of the others those that are
        given the most (KV, rows), of equal ones the first.
        """
        chosen = highest(given.masked_fill(hidden, -torch.inf), self.room)
        return hidden.repeat(len(given), 1).scatter_(1, chosen.long(), True)

    def listed(self, given: torch.Tensor) -> Listed:
        """The same for a node that sees all rows: what comes before the last ones is given so much
        (KV, rows - recent).
        """
        given[:, : self.sinks] = torch.inf
        lists = highest(given, self.sinks + self.room)
        return Listed(lists[:, None], 1, given.shape[1])
