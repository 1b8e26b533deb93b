"""What models have in common that are a decoder's modules over rows or weights of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foretell.cache.job import Job
from foretell.core.model import Computed, Model
from foretell.ops.threads import torch_threads


class Derived(Model):
    """A model of the decoder `base`'s shape, with caches of its own.

    `mark` says in its name what it is. torch computes it, whatever computes the base.
    """

    def __init__(self, base: Any, name_mark: str):
        self.base = base
        self.name = f"{base.name}[{name_mark}]"
        self.vocab = base.vocab
        self.context = base.context
        self.layout = base.layout
        self.dtype = base.dtype
        self.device = base.device
        self.caps = base.caps
        self.tokenizer = base.tokenizer

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        embeddings: torch.Tensor = self.base.embed(tokens)
        return embeddings

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        with torch_threads(self.threads_wanted or torch.get_num_threads()):
            return super().compute(jobs, taps)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        result: tuple[torch.Tensor, dict[int, torch.Tensor]]
        result = self.base.run(ids, positions, rows, first_job, taps)
        return result
