"""What a model of uniform noise computes in one forward: texts, or canvases after them.

Its text is read as a decoder reads one, each token by those before it, and its rows stay. A canvas
follows all of the text; its positions see the text and each other, and leave nothing after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import NO_STATES
from foretell.core.masked_text import MASKED, Look
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.ops.attention import LayerQuery


@dataclass(slots=True, eq=False)
class BehindText(Job):
    """The positions of a canvas. `said`: what the model said of them before, (n, V)."""

    said: torch.Tensor | None = None

    def suits(
        self, layers: bool, segments: bool, watched: bool = False, canvases: bool = False
    ) -> bool:
        return False

    def text_rows(self, layer: int, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (KV, rows, D) of the text that all positions see; of a window, which is
        what one of its tokens sees, they see one token less."""
        first_row = 0 if window is None else max(0, self.start - window + 1)
        keys, values = self.cache.k[layer], self.cache.v[layer]
        return keys[:, first_row : self.start], values[:, first_row : self.start]

    def attend(self, query: LayerQuery) -> torch.Tensor:
        keys, values = self.text_rows(query.layer, query.window)
        all_keys = torch.cat([keys.to(query.k), query.k], 1)
        all_values = torch.cat([values.to(query.v), query.v], 1)
        return query.attend(all_keys, all_values, None)


class TextCache(Cache):
    """Rows of a text, all of it. A Look waits until they are there."""

    sharable = False
    taken = 0  # tokens that the running forward takes in

    def sync(self, tokens: Sequence[int]) -> int:
        self.synced = len(tokens)
        return len(tokens) - self.length

    def commit(self, tokens: Sequence[int]) -> None:
        """Rows are of committed tokens alone."""

    settle = commit

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        if not isinstance(ask, Look):
            raise Unsupported(
                "a model that fills canvases writes no text from left to right; choose a method "
                "of the kind 'diffusion' for its noise, for example method='renoise'"
            )
        known_count, self.taken = self.length, 0
        if known_count < len(tokens):
            text_piece = list(tokens[known_count : known_count + chunk])
            self.taken = len(text_piece)
            self.reserve(known_count + len(text_piece))
            positions = list(range(known_count, known_count + len(text_piece)))
            return Job(self, text_piece, positions, known_count, None, [], -len(text_piece)), False
        canvas_ids = list(ask.canvas[known_count:])
        assert MASKED not in canvas_ids, "what stands in a canvas of uniform noise are tokens"
        row_indices = [position - known_count for position in ask.wanted]
        positions = list(range(known_count, len(ask.canvas)))
        job = BehindText(self, canvas_ids, positions, known_count, None, row_indices, 0)
        job.said = ask.said
        return job, True

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        self.length += self.taken
        self.base += self.taken
        self.taken = 0


def split_jobs(jobs: Sequence[Job]) -> tuple[list[Job], list[BehindText]]:
    """Jobs of texts, and jobs of canvases."""
    canvases = [job for job in jobs if isinstance(job, BehindText)]
    return [job for job in jobs if not isinstance(job, BehindText)], canvases


def pack_jobs(jobs: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions (1, T) of these jobs."""
    token_ids = [token for job in jobs for token in job.tokens]
    positions = [position for job in jobs for position in job.positions]
    return torch.tensor([token_ids], device=device), torch.tensor([positions], device=device)
