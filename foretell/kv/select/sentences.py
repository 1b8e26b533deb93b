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
from foretell.ops.row_attention import Listed, highest_positions

if TYPE_CHECKING:
    from foretell.core.model import Model

# Full stops, perhaps with what closes a quotation after them, and empty lines.
END = re.compile(r"\s*[.!?。！？…]+[\"'”’»)\]]*\s*|[ \t\r]*\n[ \t\r]*\n\s*")  # noqa: RUF001
OPEN = 0  # in place of a sentence's number: of rows in none that has ended


def sentence_ends(target: Model, method: str) -> frozenset[int]:
    """The ids whose text is an end of a sentence and nothing else. Raises Unsupported where there
    is no tokenizer to tell, or it has no such tokens.
    """
    end_tokens = _ends(words_of(target, method))
    if not end_tokens:
        missing_need = "a tokenizer with tokens that end a sentence"
        raise Unsupported.missing_capability(method, target.name, missing_need, "leave kv out")
    return end_tokens


@lru_cache(maxsize=8)
def _ends(words: Words) -> frozenset[int]:
    texts = (piece.decode("utf-8", "replace") if piece else "" for piece in words.pieces)
    return frozenset(token for token, text in enumerate(texts) if END.fullmatch(text))


@dataclass(frozen=True)
class Path:
    """The place of a new node: scratch rows are numbered from 0 after the committed ones."""

    rows: tuple[int, ...]  # scratch rows on its path, its own the last
    ends: tuple[int, ...]  # of them those above it that end a sentence

    @property
    def running_rows(self) -> tuple[int, ...]:
        """The rows of its own sentence."""
        if not self.ends:
            return self.rows
        return self.rows[self.rows.index(self.ends[-1]) + 1 :]


@dataclass(frozen=True)
class Node:
    """The place of a node, and what it reads anyway or does not see, see `Share.hidden_rows`."""

    path: Path
    hidden: torch.Tensor | None


def node_paths(
    tokens: Sequence[int], parents: Sequence[int], first_row: int, ends: frozenset[int]
) -> list[Path]:
    """Paths of scratch rows, those from `first_row` on; `parents`: -1 is the committed text."""
    row_paths: list[Path] = []
    for row, parent in enumerate(parents):
        parent_path = row_paths[parent] if parent >= 0 else Path((), ())
        parent_ends = parent >= 0 and tokens[parent] in ends
        row_paths.append(
            Path(
                (*parent_path.rows, row),
                (*parent_path.ends, parent) if parent_ends else parent_path.ends,
            )
        )
    return row_paths[first_row:]


@dataclass(frozen=True, eq=False)
class Index:
    """The sentences of a layer's rows."""

    sentence_of: torch.Tensor  # (KV, rows): the number of each row's sentence, from 1 on, or OPEN
    means: torch.Tensor  # (KV, S, D): the mean key of each sentence, in float32 or wider

    @classmethod
    def of_places(cls, keys: torch.Tensor, row_places: torch.Tensor, ends: Sequence[int]) -> Index:
        """Indexes keys (KV, n, D) that stand at these places of a text (KV, n), which has tokens
        that end a sentence at `ends`, ascending. A sentence without rows has mean 0.
        """
        heads, _, width = keys.shape
        end_positions = torch.tensor(list(ends), dtype=torch.long, device=keys.device)
        sentence_of = torch.searchsorted(end_positions, row_places.contiguous())  # from 0 on
        wide_keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        key_sums = wide_keys.new_zeros(heads, len(ends) + 1, width)
        key_sums = key_sums.scatter_add(1, sentence_of[..., None].expand_as(wide_keys), wide_keys)
        key_counts = key_sums.new_zeros(key_sums.shape[:2]).scatter_add(
            1, sentence_of, key_sums.new_ones(sentence_of.shape)
        )
        return cls(sentence_of + 1, key_sums / key_counts.clamp(min=1)[..., None])

    def close_sentence(self, keys: torch.Tensor, rows: Sequence[int]) -> Index:
        """This index with these rows, ascending, as one more sentence; `keys` (KV, any, D) of all
        rows.
        """
        missing_rows = max(0, rows[-1] + 1 - self.sentence_of.shape[1])
        sentence_of = torch.nn.functional.pad(self.sentence_of, (0, missing_rows), value=OPEN)
        sentence_rows = torch.tensor(list(rows), device=keys.device)
        mean_key = keys[:, sentence_rows].to(self.means.dtype).mean(1, keepdim=True)
        sentence_number = self.means.shape[1] + 1
        return Index(
            sentence_of.index_fill(1, sentence_rows, sentence_number),
            torch.cat([self.means, mean_key], 1),
        )

    def extend_along(self, keys: torch.Tensor, path: Path, open_rows: range) -> Index:
        """This index with the sentences that a node's path ended, after the committed rows
        `open_rows` that stand in none.
        """
        index, sentence_rows = self, list(open_rows)
        for row in path.rows[:-1]:
            sentence_rows.append(open_rows.stop + row)
            if row in path.ends:
                index, sentence_rows = index.close_sentence(keys, sentence_rows), []
        return index

    def score_rows(self, mean_query: torch.Tensor, row_count: int) -> torch.Tensor:
        """Scores that a query (KV, D) gives to the first `row_count` rows by their sentences (KV,
        rows): the products with the sentences' mean keys, and less to rows in none.
        """
        sentence_scores = (mean_query[:, None] @ self.means.transpose(1, 2))[:, 0]
        lowest_score = torch.finfo(sentence_scores.dtype).min
        row_scores = torch.nn.functional.pad(sentence_scores, (1, 0), value=lowest_score).gather(
            1, self.sentence_of[:, :row_count]
        )
        return torch.nn.functional.pad(
            row_scores, (0, row_count - row_scores.shape[1]), value=lowest_score
        )


@dataclass(frozen=True)
class Share:
    """How many rows a query reads: the first ones, the last ones, `room` of those between them."""

    sinks: int = 0
    recent: int = 1
    room: int = 1

    def hidden_rows(
        self, base: int, path: Path, row_count: int, device: torch.device
    ) -> torch.Tensor | None:
        """Which of so many rows a node reads anyway, or does not see, bool (rows,): it sees `base`
        committed rows and its path. None: there is room for all that it sees.
        """
        recent_start = base + len(path.rows) - self.recent
        hidden_mask = torch.ones(row_count, dtype=torch.bool)
        hidden_mask[self.sinks : min(base, max(0, recent_start))] = False
        for row in path.rows[max(0, self.sinks - base) : max(0, recent_start - base)]:
            hidden_mask[base + row] = False
        return hidden_mask.to(device) if row_count - int(hidden_mask.sum()) > self.room else None

    def place_nodes(
        self, new_paths: Sequence[Path], base: int, row_count: int, device: torch.device
    ) -> list[Node]:
        """The nodes that stand there, of a cache with so many rows, `base` of them committed."""
        return [Node(path, self.hidden_rows(base, path, row_count, device)) for path in new_paths]

    def read_mask(self, row_scores: torch.Tensor, hidden_mask: torch.Tensor) -> torch.Tensor:
        """The rows that a node reads, bool (KV, rows): the hidden ones, and of the others those
        that are given the most (KV, rows), of equal ones the first.
        """
        chosen_rows = highest_positions(row_scores.masked_fill(hidden_mask, -torch.inf), self.room)
        return hidden_mask.repeat(len(row_scores), 1).scatter_(1, chosen_rows.long(), True)

    def list_rows(self, row_scores: torch.Tensor) -> Listed:
        """The rows of a node that sees all rows: what comes before the last ones has these scores
        (KV, rows - recent).
        """
        row_scores[:, : self.sinks] = torch.inf
        row_lists = highest_positions(row_scores, self.sinks + self.room)
        return Listed(row_lists[:, None], 1, row_scores.shape[1])
