"""A draft model that reads the beginning of a text and its end, so that its steps stay quick.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import CachePolicy
from foretell.core.model import Computed, Model

if TYPE_CHECKING:
    import torch

    from foretell.core.request import Request

SLACK = 4  # rows are given up when there is one of so many more than are kept


@dataclass
class Recent(CachePolicy):
    """Keeps the rows of the first `sinks` tokens and of the last `window`, and somewhat more.

    Positions stay those in the text.
    """

    sinks: int
    window: int

    waits = True

    @property
    def kept(self) -> int:
        return self.sinks + self.window

    @property
    def step(self) -> int:
        """Tokens after which rows are given up again."""
        return max(1, self.kept // SLACK)

    def room_left(self, length: int) -> int:
        if length < self.kept:
            return self.kept + self.step - length
        return self.step - (length - self.kept) % self.step

    def change_rows(self, cache: Any) -> None:
        if cache.base > self.kept:
            cache.compact_rows([*range(self.sinks), *range(cache.base - self.window, cache.base)])


class Windowed(Model):
    """A model whose caches keep the rows of a text's first and last tokens alone.

    `base` computes it, by its own backend.
    """

    def __init__(self, base: Model, sinks: int, window: int):
        self.base = base
        self.sinks, self.window = sinks, window
        self.name = f"{base.name}[{sinks} first and {window} last rows]"
        self.vocab = base.vocab
        self.context = base.context
        self.layout = base.layout
        self.dtype = base.dtype
        self.device = base.device
        self.caps = base.caps - {"layers", "parts", "taps"}
        self.tokenizer = base.tokenizer

    @property
    def usual_backend(self) -> str:  # type: ignore[override]
        return self.base.usual_backend

    @property
    def most_jobs(self) -> int:  # type: ignore[override]
        return self.base.most_jobs

    @property
    def reads_segments(self) -> bool:  # type: ignore[override]
        return self.base.reads_segments

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = self.base.cache(request, beside)
        cache.use(Recent(self.sinks, self.window))
        return cache

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        self.base.threads_wanted = self.threads_wanted or self.base.threads_wanted
        return self.base.compute(jobs, taps)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.base.embed(tokens)
