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
- a prompt is read as a whole, and evicted from behind it
- keys are kept as they were made and turned once in float32; the paper keeps them unturned
- with `every` above 1 rows are given up by so many at once, and drafts may be as long
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig, Unsupported
from foretell.ops.keeping import KV, Evicting, check_every

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class StreamingLlm(KV):
    """Counts of rows and tokens."""

    sinks: int = 4  # first tokens
    window: int = 512  # last tokens
    every: int = 1  # tokens between two evictions

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise BadConfig.field(
                    f"streaming-llm:{name}", getattr(self, name), f"at least {least}"
                )
        check_every("streaming-llm", self.every)

    def policy(self, target: Model) -> Streaming:
        self.fits(target)
        turning = getattr(target, "turning", None)
        if turning is None:
            need = "rotary positions"
            raise Unsupported.missing("kv=streaming-llm", target.name, need, "leave kv out")
        budget = self.sinks + self.window
        return Streaming(budget, self.every, sinks=self.sinks, turn=turning("kv=streaming-llm"))


@dataclass
class Streaming(Evicting):
    sinks: int = 0
    turn: Any = None  # keys (KV, n, D) and positions they move by -> keys there
    # Of each layer the keys of the rows (KV, kept, D) as they were made, and at what positions.
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.made, self.places = {}, []

    def evict(self, cache: Any) -> None:
        new = range(len(self.places), cache.base)
        places = [*self.places, *new]  # rows stand at their positions
        keep = [*range(self.sinks), *range(cache.base - self.budget + self.sinks, cache.base)]
        self.places = [places[row] for row in keep]
        made = {}
        for layer, keys in enumerate(cache.k):
            fresh = keys[:, new.start : cache.base]
            whole = torch.cat([self.made[layer], fresh], 1) if self.made else fresh
            made[layer] = whole[:, keep]
        self.made = made
        cache.compact(keep)
        cache.positions = None
        cache.offset = cache.length - cache.base
        moves = torch.arange(cache.base) - torch.tensor(self.places)
        moved = slice(self.sinks, cache.base)
        for layer, keys in enumerate(cache.k):
            keys[:, moved] = self.turn(made[layer][:, moved], moves[moved])
