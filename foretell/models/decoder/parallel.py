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
from foretell.models.backend import interleave_results
from foretell.models.decoder.fused import Fused
from foretell.models.decoder.loop import Block, Loop

if TYPE_CHECKING:
    from foretell.core.request import Request


class Group:
    """Several layers as one block: their attentions side by side, then the rest in turn."""

    def __init__(self, layers: Sequence[Fused]):
        self.layers = layers
        self.takes_padding = all(layer.takes_padding for layer in layers)

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        attended = [layer.attended(hidden[0], rotary, positions) for layer in self.layers]
        for layer, attention_output in zip(self.layers, attended, strict=True):
            hidden = layer.mlp(layer.add(hidden, attention_output, layer.after_attention))
        return hidden


class Through:
    """A block that passes its input on, in place of a layer that a Group has computed already."""

    takes_padding = True

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        return hidden


def group_layers(loop: Loop, group_size: int) -> Loop:
    """Copies the loop with its layers, but for the first and the last, in groups of `group_size`.

    Raises LookupError where the layers cannot be taken apart.
    """
    layers = [block for block in loop.blocks if isinstance(block, Fused)]
    is_parallel = any(block.description.parallel for block in layers)
    if len(layers) < len(loop.blocks) or loop.kinds is not None or is_parallel:
        raise LookupError("its layers are of another build than the llama family's")
    blocks: list[Block] = list(loop.blocks)
    last_layer = len(blocks) - 1
    for first_layer in range(1, last_layer, group_size):
        end_layer = min(first_layer + group_size, last_layer)
        blocks[first_layer] = Group(layers[first_layer:end_layer])
        blocks[first_layer + 1 : end_layer] = [Through() for _ in range(first_layer + 1, end_layer)]
    grouped_loop = copy.copy(loop)
    grouped_loop.blocks = blocks
    return grouped_loop


class LayerParallel(Model):
    """A decoder as a draft model that is rough below the root of a tree.

    `run_with(..., loop)`: the decoder's `run` with another loop. `size`: of a group; 1: it is the
    decoder itself. It has the decoder's rows, backend and turns with it.
    """

    def __init__(self, base: Any, loop: Loop, group_size: int, run_with: Callable[..., Any]):
        self.base = base
        self.name = f"{base.name}[groups of {group_size}]"
        self.size = group_size
        self.rough = group_layers(loop, group_size)
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
        below_root = [job for job in jobs if self.size > 1 and job.first > 0]
        other_jobs = [job for job in jobs if job not in below_root]
        results: list[tuple[list[Job], Computed]] = []
        if other_jobs:
            self.base.threads_wanted = self.threads_wanted
            results.append((other_jobs, self.base.compute(other_jobs, taps)))
        if below_root:
            results.append((below_root, super().compute(below_root, taps)))
        if len(results) == 1:
            return results[0][1]
        combined = interleave_results(jobs, *results)
        combined.computed_by = "torch"
        return combined

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        result: tuple[torch.Tensor, dict[int, torch.Tensor]] = self.run_with(
            token_ids, positions, row_indices, first_job, taps, self.rough
        )
        return result

    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        replies = super().forward(jobs)
        if self.size > 1:
            for job in jobs:
                distrust_drafts(job)
        return replies


def distrust_drafts(job: Job) -> None:
    """Marks rows below the root as not to be kept when their tokens are committed: they are
    computed again.
    """
    pending_rows = job.start - job.cache.base - job.first
    job.cache.trusted = min(job.cache.trusted, pending_rows + 1)
