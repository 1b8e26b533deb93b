"""Rows of a cache by the sentences of their text: which tokens end one, and what stands in each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from foretell.errors import Unsupported
from foretell.ops.words import Words, words_of

if TYPE_CHECKING:
    from foretell.core.model import Model

# Full stops, perhaps with what closes a quotation behind them, and empty lines.
END = re.compile(r"\s*[.!?。！？…]+[\"'”’»)\]]*\s*|[ \t\r]*\n[ \t\r]*\n\s*")  # noqa: RUF001
OPEN = -1  # of rows in no sentence that has ended


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


@dataclass(frozen=True, eq=False)
class Index:
    """The sentences of a layer's rows."""

    of: torch.Tensor  # (KV, rows): the number of each row's sentence, or OPEN
    means: torch.Tensor  # (KV, S, D): the mean key of each sentence, in float32 or wider

    @classmethod
    def of_places(cls, keys: torch.Tensor, places: torch.Tensor, ends: Sequence[int]) -> Index:
        """Of keys (KV, n, D) that stand at these places of a text (KV, n), which has tokens that
        end a sentence at `ends`, ascending. A sentence without rows has mean 0.
        """
        heads, _, width = keys.shape
        last = torch.tensor(list(ends), dtype=torch.long, device=keys.device)
        of = torch.searchsorted(last, places.contiguous())
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        sums = wide.new_zeros(heads, len(ends) + 1, width)
        sums = sums.scatter_add(1, of[..., None].expand_as(wide), wide)
        counts = sums.new_zeros(sums.shape[:2]).scatter_add(1, of, sums.new_ones(of.shape))
        return cls(of, sums / counts.clamp(min=1)[..., None])

    def closed(self, keys: torch.Tensor, rows: Sequence[int]) -> Index:
        """The same with these rows, ascending, as one more sentence; `keys` (KV, any, D) of all
        rows.
        """
        more = max(0, rows[-1] + 1 - self.of.shape[1])
        of = torch.nn.functional.pad(self.of, (0, more), value=OPEN)
        chosen = torch.tensor(list(rows), device=keys.device)
        mean = keys[:, chosen].to(self.means.dtype).mean(1, keepdim=True)
        number = self.means.shape[1]
        return Index(of.index_fill(1, chosen, number), torch.cat([self.means, mean], 1))

    def order(self, asked: torch.Tensor, rows: int) -> torch.Tensor:
        """In what order so many rows are taken by the queries `asked` (KV, n, D): (KV, n, rows).

        Sentences of the highest products with their mean key come first, of equal ones the later;
        in a sentence the first rows; rows in none come last.
        """
        products = asked @ self.means.transpose(1, 2)
        count = products.shape[-1]
        later = products.flip(-1).argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(later).scatter_(
            -1, later, torch.arange(count).to(later).expand_as(later)
        )
        ranks = torch.nn.functional.pad(rank.flip(-1), (0, 1), value=count)
        of = torch.nn.functional.pad(self.of, (0, rows - self.of.shape[1]), value=OPEN)
        of = torch.where(of < 0, count, of)[:, None].expand(-1, asked.shape[1], -1)
        return ranks.gather(-1, of) * rows + torch.arange(rows, device=of.device)


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


@dataclass(frozen=True)
class Share:
    """How many rows a query reads: the first ones, the last ones, `room` of those between them."""

    sinks: int = 0
    recent: int = 1
    room: int = 1

    def left_out(self, order: torch.Tensor, base: int, path: Path) -> torch.Tensor:
        """What a node does not read, bool (KV, rows): it sees `base` committed rows and its path,
        and the first in this order (KV, rows) come first.
        """
        end = base + len(path.rows) - self.recent
        between = torch.zeros(order.shape[1], dtype=torch.bool)
        between[self.sinks : min(base, max(0, end))] = True
        for row in path.rows[max(0, self.sinks - base) : max(0, end - base)]:
            between[base + row] = True
        between = between.to(order.device)
        if int(between.sum()) <= self.room:
            return torch.zeros_like(order, dtype=torch.bool)
        places = order.masked_fill(~between, torch.iinfo(order.dtype).max)
        last = places.topk(self.room, -1, largest=False).values.amax(-1, keepdim=True)
        return between & (places > last)
