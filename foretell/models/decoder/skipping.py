"""Forwards of jobs some of whose tokens leave out layers, as their cache policies say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.models.executor import interleave

Run = Callable[[Sequence[Job], Sequence[int]], Computed]


def skipping(jobs: Sequence[Job], taps: Sequence[int], run: Run) -> Computed:
    """What `run` gives of these jobs; those that skip go by themselves, as their policies say."""
    alone = [job for job in jobs if job.cache.policy is not None and job.cache.policy.skips(job)]
    if not alone:
        return run(jobs, taps)
    others = [job for job in jobs if job not in alone]
    parts: list[tuple[Sequence[Job], Computed]]
    parts = [((job,), job.cache.policy.through(job, taps, run)) for job in alone]
    if others:
        parts.append((others, run(others, taps)))
    if len(parts) == 1:
        return parts[0][1]
    return interleave(jobs, *parts)
