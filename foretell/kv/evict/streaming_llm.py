"""Keeps the first tokens and the last ones, at the positions of their rows.

The first `sinks` tokens draw attention whatever they say; between them and the `window` last ones
everything is given up. Positions count rows, so no distance is longer than the cache, and a text
may be longer than the model's context.

Paper: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453
Guarantee: lossy: rows are given up; with drafts the text is the one without them
Cost: target 1
Needs: rotary positions, and cache rows of every layer, of all of the text
Trains: nothing
Differs:
- a prompt is read as a whole, and evicted from when it is read
- keys are kept as they were made and turned once in float32; the paper keeps them unturned
- with `every` above 1 rows are given up by so many at once, and drafts may be as long
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import Range
from foretell.kv.base import KV, Evicting
from foretell.kv.select.base import Ends
from foretell.kv.slots import Slots, find_turn

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class StreamingLlm(KV):
    """Counts of rows and tokens."""

    role = "evictor"

    sinks: Annotated[int, Range(0)] = 4  # first tokens
    window: Annotated[int, Range(1)] = 512  # last tokens
    every: Annotated[int, Range(1)] = 1  # tokens between two evictions

    def build_policy(self, target: Model) -> Streaming:
        self.check_target(target)
        budget = self.sinks + self.window
        slots = Slots(find_turn("streaming-llm", target), still=self.sinks)
        streaming_policy = Streaming(budget, self.every, sinks=self.sinks, slots=slots)
        streaming_policy.endless = budget + self.every <= target.context
        return streaming_policy

    def with_budget(self, rows: int) -> StreamingLlm:
        return replace(self, window=rows - self.sinks)

    def build_view(self, target: Model) -> Ends:
        """The policy's rows of a cache that keeps all, which stay at their positions."""
        self.check_target(target)
        return Ends(0, self.sinks, self.window)


@dataclass
class Streaming(Evicting):
    sinks: int
    slots: Slots

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.slots = self.slots.without_rows()

    def evict_rows(self, cache: Any) -> None:
        window_rows = range(cache.base - self.budget + self.sinks, cache.base)
        surviving_rows = torch.tensor([[*range(self.sinks), *window_rows]], device=cache.device)
        self.slots = self.slots.keep_rows(cache, [surviving_rows] * len(cache.layout))
