"""What a decoder reads of a request's source: keys and values that its layers attend to beside the
text.

They are computed once and belong to the source, not to a text. Every cache of the same source
shares them: forks, other texts of the request, the n samples of one prompt.
"""

from __future__ import annotations

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import Segment
from foretell.core.model import STEP
from foretell.models.decoder.blocks import Blocks
from foretell.ops.attention import Bias, attend

Layers = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer keys and values (KV, S, D)


class SourceRows:
    """A source and what the decoder's layers see of it; `layers` is None until it was encoded."""

    def __init__(self, tokens: tuple[int, ...]):
        self.tokens = tokens
        self.layers: Layers | None = None

    @property
    def bytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers or ())


def source_attention(
    layer_index: int, q: torch.Tensor, scale: float | None, softcap: float | None
) -> torch.Tensor:
    """Packed q (H, T, D) of the running step over each job's own source -> (T, H, D)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    first_node = 0
    for job in STEP.get():
        end_node = first_node + len(job.tokens)
        k, v = job.cache.source.layers[layer_index]
        outputs.append(attend(q[:, first_node:end_node], k, v, None, scale, softcap))
        first_node = end_node
    return torch.cat(outputs)


class SourceJob(Job):
    """A job whose layers share one bias by position, which is computed once a forward."""

    shared_bias: tuple[list[int], torch.Tensor] | None = None  # for these columns

    def _bias_mask(self, bias: Bias, columns: list[int], dtype: torch.dtype) -> torch.Tensor:
        if self.shared_bias is None or self.shared_bias[0] != columns:
            self.shared_bias = columns, super()._bias_mask(bias, columns, dtype)
        return self.shared_bias[1]


class SourceCache(Cache):
    """Rows of one text beside those of its source."""

    job_type = SourceJob
    source: SourceRows

    def adopt_segment(self, segment: Segment) -> bool:
        """Returns False: rows of a text belong to its source, so that it computes its own."""
        return False

    @property
    def bytes(self) -> int:
        """The bytes of all it holds; what several caches share counts for each."""
        return super().bytes + self.source.bytes


class BlockCache(Blocks, SourceCache):
    """A cache of a model that fills in blocks and reads a source."""
