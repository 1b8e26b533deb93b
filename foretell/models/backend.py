"""What computes a Decoder's forward in torch's place: a backend, and what it returns.

A backend stores the keys and values of the new nodes in the jobs' caches and returns logits and
hidden states. It takes the jobs that its `takes_*` flags allow; where it returns None, torch
computes them on the same caches. `backend_registry.py` finds backends by their files' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed


class Backend(Protocol):
    """Computes forwards in torch's place.

    `name`: the name of its file, as users give it. `size`: nodes that the last forward computed,
    padding included. `exact_bits`: whether a row's result depends on no other row, to the last bit.
    `takes_layers`: whether it also computes parts of the layers, and given states;
    `takes_segments`: and texts whose first rows are shared. `takes_watched`: and jobs whose
    attention a cache policy computes. `takes_canvases`: and positions of canvases. `sizes`: the
    numbers of nodes that forwards are padded to, () if any number is computed as it is.
    `most_jobs`: how many jobs it takes in one forward, 0: any number; more are torch's.
    `fallback`: the backend of what this one leaves, None: torch.
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
    fallback: Backend | None

    def cache(self) -> Cache:
        """An empty cache whose rows this backend, its fallback and torch can read and write."""

    def warm(self, job: Job, taps: Sequence[int] = ()) -> None:
        """Builds what this job needs, before its forward is timed. By default there is nothing."""
        return

    def release(self) -> None:
        """Lets go of the graphs built so far. Those that are needed again are built again."""

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        """Computes these jobs in one forward; None: torch is to compute them."""


def join_results(results: Sequence[Computed]) -> Computed:
    """Joins several forwards, one below the other, with the hidden states that all of them have."""
    if len(results) == 1:
        return results[0]
    shared_taps = set.intersection(*(set(result.hidden) for result in results))
    hidden = {tap: torch.cat([result.hidden[tap] for result in results]) for tap in shared_taps}
    backend_names = "+".join(dict.fromkeys(result.computed_by for result in results))
    logits = torch.cat([result.logits for result in results])
    return Computed(logits, hidden, backend_names, sum(result.width for result in results))


def interleave_results(jobs: Sequence[Job], *groups: tuple[Sequence[Job], Computed]) -> Computed:
    """Puts results of some of the jobs each together, in the order of `jobs`."""
    job_results: dict[Job, Computed] = {}
    for group_jobs, group_result in groups:
        first_row = first_node = 0
        for job in group_jobs:
            end_row, end_node = first_row + len(job.rows), first_node + len(job.tokens)
            hidden = {
                tap: states[first_node:end_node] for tap, states in group_result.hidden.items()
            }
            job_results[job] = Computed(group_result.logits[first_row:end_row], hidden)
            first_row, first_node = end_row, end_node
    combined = join_results([job_results[job] for job in jobs])
    combined.computed_by = "+".join(
        dict.fromkeys(group_result.computed_by for _, group_result in groups)
    )
    combined.width = sum(group_result.width for _, group_result in groups)
    return combined
