"""A decoder that reads a part of its rows of a long text: a quick draft of the decoder itself.

A step costs the decoder's weights and the few rows that were chosen (retrieved.py), however long
the text is.

Source: Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical
Speculative Decoding" (arXiv 2404.11912), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.cache import Cache
from foretell.core.model import Computed, Model
from foretell.errors import Unsupported
from foretell.families.retrieved import RetrievedCache
from foretell.memory.job import Job
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request


class Retrieving(Model):
    """The decoder `base` over at most `budget` retrieved rows of a text, in chunks of `chunk`.

    torch computes it. Raises Unsupported for a decoder whose layers are not ours, or see a window
    of positions only.
    """

    copies_rows = True

    def __init__(self, base: Any, budget: int, chunk: int):
        reason = base.loop_refused
        if base.loop is not None and any(base.loop.windows):
            reason = "some see a window of it"
        if reason is not None:
            need = f"layers that see all of a text ({reason})"
            cure = "use the method draft"
            raise Unsupported.missing("rows that are retrieved", base.name, need, cure)
        self.base = base
        self.budget, self.chunk = budget, chunk
        self.name = f"{base.name}[{budget} retrieved rows]"
        self.vocab = base.vocab
        self.context = base.context
        self.layout = base.layout
        self.dtype = base.dtype
        self.device = base.device
        self.caps = base.caps - {"layers", "parts", "taps"}
        self.tokenizer = base.tokenizer

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = RetrievedCache(self.layout, self.dtype, self.device, self.budget, self.chunk)
        return self.prepared(cache, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        with torch_threads(self.threads_wanted or torch.get_num_threads()):
            return super().compute(jobs, taps)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        found: tuple[torch.Tensor, dict[int, torch.Tensor]]
        found = self.base.run(ids, positions, rows, first, taps)
        return found
