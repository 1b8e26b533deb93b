"""What computes a Decoder's forward in torch's place: an executor, and what it returns.

An executor stores the keys and values of the new nodes in the jobs' caches and returns logits and
hidden states. It takes plain jobs only; for anything it cannot compute it returns None, and torch
computes these jobs on the same caches. `registry.py` finds executors by their files' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed


class Executor(Protocol):
    """Computes forwards in torch's place.

    `name`: the name of its file, as users give it. `size`: nodes that the last forward computed,
    padding included. `exact_bits`: whether a row's result depends on no other row, to the last bit.
    `takes_layers`: whether it also computes parts of the layers, and given states;
    `takes_segments`: and texts whose first rows are shared. `takes_watched`: and jobs whose
    attention a cache policy computes. `takes_canvases`: and positions of canvases. `sizes`: the
    numbers of nodes that forwards are padded to, () if any number is computed as it is.
    `most_jobs`: how many jobs it takes in one forward, 0: any number; more are torch's.
    `fallback`: the executor of what this one leaves, None: torch.
    """

    name: str
    size: int
    exact_bits: bool = False
    takes_layers: bool = False
    takes_segments: bool = False
    takes_watched: bool = False
    takes_canvases: bool = False
    most_jobs: int = 0
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


def join(parts: Sequence[Computed]) -> Computed:
    """Several forwards, one below the other; hidden states that all of them have."""
    if len(parts) == 1:
        return parts[0]
    taps = set.intersection(*(set(part.hidden) for part in parts))
    hidden = {tap: torch.cat([part.hidden[tap] for part in parts]) for tap in taps}
    names = "+".join(dict.fromkeys(part.computed_by for part in parts))
    logits = torch.cat([part.logits for part in parts])
    return Computed(logits, hidden, names, sum(part.width for part in parts))


def interleave(jobs: Sequence[Job], *parts: tuple[Sequence[Job], Computed]) -> Computed:
    """One result in the order of `jobs` from results of some of them each."""
    pieces: dict[Job, Computed] = {}
    for group, computed in parts:
        row = node = 0
        for job in group:
            end_row, end_node = row + len(job.rows), node + len(job.tokens)
            hidden = {tap: states[node:end_node] for tap, states in computed.hidden.items()}
            pieces[job] = Computed(computed.logits[row:end_row], hidden)
            row, node = end_row, end_node
    whole = join([pieces[job] for job in jobs])
    whole.computed_by = "+".join(dict.fromkeys(computed.computed_by for _, computed in parts))
    whole.width = sum(computed.width for _, computed in parts)
    return whole
