"""What computes a Decoder's forward in torch's place: an executor, and what it returns.

An executor stores the keys and values of the new nodes in the jobs' caches and returns logits and
hidden states. It takes plain jobs only; for anything it cannot compute it returns None, and torch
computes these jobs on the same caches. `registry.py` finds executors by their files' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from foretell.core.cache import Cache, Job


@dataclass(slots=True)
class Computed:
    """The result of one forward; jobs, and what belongs to each, in the order they were given.

    `logits`: (all wanted rows, V), float32 or wider. `hidden[i]`: (all new nodes, E), what enters
    layer i, for every i that was tapped; i = number of layers: what leaves the last layer, before
    the final norm.
    """

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def join(results: Sequence[Computed]) -> Computed:
        """The results of several forwards, one below the other; of hidden states those that all
        of them have.
        """
        if len(results) == 1:
            return results[0]
        hidden = {}
        for layer in set.intersection(*(set(result.hidden) for result in results)):
            hidden[layer] = torch.cat([result.hidden[layer] for result in results])
        return Computed(torch.cat([result.logits for result in results]), hidden)


class Executor(Protocol):
    """Computes forwards in torch's place.

    `name`: the name of its file, as users give it. `size`: nodes that the last forward computed,
    padding included. `sizes`: the numbers of nodes that forwards are padded to, () if any number
    is computed as it is. `fallback`: the executor of what this one leaves, None: torch.
    """

    name: str
    size: int
    sizes: tuple[int, ...]
    fallback: Executor | None

    def cache(self) -> Cache:
        """An empty cache whose rows this executor, its fallback and torch can read and write."""

    def warm(self, job: Job, taps: Sequence[int] = ()) -> None:
        """Builds what this job needs, before its forward is timed. By default there is nothing."""
        return

    def release(self) -> None:
        """Lets go of the graphs built so far. Those that are needed again are built again."""

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        """One forward of these jobs; None: torch is to compute them."""
