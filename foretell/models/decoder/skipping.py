"""Forwards of jobs some of whose tokens leave out layers, as their cache policies say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.models.backend import interleave_results

Run = Callable[[Sequence[Job], Sequence[int]], Computed]


def run_skipping(jobs: Sequence[Job], taps: Sequence[int], run: Run) -> Computed:
    """Runs these jobs by `run`; those that skip go by themselves, as their policies say."""
    skipping_jobs = [
        job for job in jobs if job.cache.policy is not None and job.cache.policy.runs_layers(job)
    ]
    if not skipping_jobs:
        return run(jobs, taps)
    other_jobs = [job for job in jobs if job not in skipping_jobs]
    results: list[tuple[Sequence[Job], Computed]]
    results = [((job,), job.cache.policy.run_layers(job, taps, run)) for job in skipping_jobs]
    if other_jobs:
        results.append((other_jobs, run(other_jobs, taps)))
    if len(results) == 1:
        return results[0][1]
    return interleave_results(jobs, *results)
