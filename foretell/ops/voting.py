"""Rows of a prompt that its last tokens vote for, as SnapKV does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foretell.ops.keeping import NEVER, Attended, best


@dataclass
class Voted(Attended):
    """Keeps `budget` rows of a longer prompt: its last `window` tokens, and of the others those
    that got the most of their attention, smoothed over `kernel` neighbours. `pool`: max or mean.
    """

    window: int = 1
    kernel: int = 1
    pool: str = "max"

    @property
    def first(self) -> int:
        return self.prompt if self.prompt > self.budget else NEVER

    def counts(self, place: int) -> bool:
        return self.first - self.window <= place < self.first

    def room(self, length: int) -> int:
        begin = self.first - self.window
        return begin - length if length < begin else super().room(length)

    def votes(self, received: torch.Tensor) -> torch.Tensor:
        """Of what rows received (KV, rows), the smoothed votes for those before the window."""
        votes = received[:, None, : received.shape[1] - self.window]
        half = self.kernel // 2
        if self.pool == "max":
            pooled = torch.nn.functional.max_pool1d(votes, self.kernel, 1, half)
        else:
            pooled = torch.nn.functional.avg_pool1d(votes, self.kernel, 1, half)
        return pooled[:, 0]

    def chosen(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        heads, rows = received.shape
        chosen = best(self.votes(received), self.budget - self.window)
        last = torch.arange(rows - self.window, rows, device=received.device)
        return torch.cat([chosen, last.expand(heads, -1)], 1)
