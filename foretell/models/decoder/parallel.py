"""A decoder whose attention layers are computed side by side where a draft may be rough.

In a group of neighbouring layers every attention reads what enters the group, in place of what the
layer before it gave; what they say is then added layer by layer, each followed by its MLP in turn.
So the attentions of a group need not wait for one another. The first layer and the last one stand
alone. Nodes above a draft, its root included, are computed in the ordinary way, and what the rough
forward wrote to the cache is never kept: when their tokens are committed they are computed again.

Source: "EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization" (arXiv
2502.02493).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed, Model
from foretell.core.types import Reply
from foretell.models.decoder.fused import Fused
from foretell.models.decoder.loop import Block, Loop
from foretell.models.executor import interleave

if TYPE_CHECKING:
    from foretell.core.request import Request


class Group:
    """Several layers as one block: their attentions side by side, then the rest in turn."""

    def __init__(self, layers: Sequence[Fused]):
        self.layers = layers
        self.takes_padding = all(layer.takes_padding for layer in layers)

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        attended = [layer.attended(hidden[0], rotary, positions) for layer in self.layers]
        for layer, said in zip(self.layers, attended, strict=True):
            hidden = layer.mlp(hidden + said)
        return hidden


class Through:
    """In the place of a layer that a Group has computed already."""

    takes_padding = True

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        return hidden


def grouped(loop: Loop, size: int) -> Loop:
    """The loop with its layers, but for the first and the last, in groups of `size`.

    Raises LookupError where the layers cannot be taken apart.
    """
    layers = [block for block in loop.blocks if isinstance(block, Fused)]
    if len(layers) < len(loop.blocks) or loop.kinds is not None:
        raise LookupError("its layers are of another build than the llama family's")
    blocks: list[Block] = list(loop.blocks)
    last = len(blocks) - 1
    for start in range(1, last, size):
        end = min(start + size, last)
        blocks[start] = Group(layers[start:end])
        blocks[start + 1 : end] = [Through() for _ in range(start + 1, end)]
    rough = copy.copy(loop)
    rough.blocks = blocks
    return rough


class LayerParallel(Model):
    """A decoder as a draft model that is rough below the root of a tree.

    `run_with(..., loop)`: the decoder's `run` with another loop. `size`: of a group; 1: it is the
    decoder itself. It has the decoder's rows, executor and turns with it.
    """

    def __init__(self, base: Any, loop: Loop, size: int, run_with: Callable[..., Any]):
        self.base = base
        self.name = f"{base.name}[groups of {size}]"
        self.size = size
        self.rough = grouped(loop, size)
        self.run_with = run_with
        self.vocab = base.vocab
        self.context = base.context
        self.layout = base.layout
        self.dtype = base.dtype
        self.device = base.device
        self.caps = base.caps - {"layers", "taps"}
        self.reads_segments = base.reads_segments
        self.tokenizer = base.tokenizer

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache: Cache = self.base.cache(request, beside)
        return cache

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Jobs that lie below a root by the grouped layers, the others by the decoder."""
        below = [job for job in jobs if self.size > 1 and job.first > 0]
        others = [job for job in jobs if job not in below]
        parts: list[tuple[list[Job], Computed]] = []
        if others:
            self.base.threads_wanted = self.threads_wanted
            parts.append((others, self.base.compute(others, taps)))
        if below:
            parts.append((below, super().compute(below, taps)))
        if len(parts) == 1:
            return parts[0][1]
        whole = interleave(jobs, *parts)
        whole.computed_by = "torch"
        return whole

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        found: tuple[torch.Tensor, dict[int, torch.Tensor]] = self.run_with(
            ids, positions, rows, first, taps, self.rough
        )
        return found

    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        replies = super().forward(jobs)
        if self.size > 1:
            for job in jobs:
                distrust_drafts(job)
        return replies


def distrust_drafts(job: Job) -> None:
    """No row below the root is kept when its token is committed: it is computed again."""
    pending = job.start - job.cache.base - job.first
    job.cache.trusted = min(job.cache.trusted, pending + 1)
