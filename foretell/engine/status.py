"""Numbers of what an engine does and has done, and whether what it keeps is sound."""

from __future__ import annotations

from typing import Any

from foretell.core.stats import Stats


class Totals:
    """Sums over the requests that have ended."""

    def __init__(self) -> None:
        self.numbers = dict.fromkeys(
            ("requests", "prompt_tokens", "tokens", "steps", "drafted", "accepted", "drafts"), 0
        )
        self.accepted_per_position: list[int] = []

    def add(self, stats: Stats) -> None:
        numbers = self.numbers
        numbers["requests"] += 1
        for name in ("prompt_tokens", "tokens", "steps", "drafted", "accepted", "drafts"):
            numbers[name] += getattr(stats, name)
        counts = self.accepted_per_position
        for position, (_, accepted) in enumerate(stats.by_depth):
            if position == len(counts):
                counts.append(0)
            counts[position] += accepted

    def with_running(self, engine: Any) -> Totals:
        """Returns these sums with the requests in flight."""
        all_totals = Totals()
        all_totals.numbers = dict(self.numbers)
        all_totals.accepted_per_position = list(self.accepted_per_position)
        for live_request in list(engine.live):
            all_totals.add(live_request.ctx.stats)
            output = max(
                (len(b.output) for b in list(live_request.ctx.branches.values())), default=0
            )
            all_totals.numbers["tokens"] += output - live_request.ctx.stats.tokens
        return all_totals


def engine_status(engine: Any) -> dict[str, Any]:
    """Numbers of an engine at this moment. Bytes are those that caches take."""
    live_requests = list(engine.live)
    caches = [
        cache for live_request in live_requests for cache in list(live_request.caches.values())
    ]
    totals = engine.totals.with_running(engine)
    numbers = totals.numbers
    tree = None if engine.reuse is None else engine.reuse.tree
    return {
        "running": sum(not live_request.paused for live_request in live_requests),
        "waiting": sum(live_request.paused for live_request in live_requests),
        "preempted": engine.admission.preempted,
        "cache_bytes": sum(cache.allocated for cache in caches),
        "cache_limit": engine.admission.memory,
        "prefix_bytes": tree.bytes if tree else 0,
        "prefix_limit": tree.limit if tree else 0,
        "learnt_bytes": sum(getattr(s, "nbytes", 0) for s in list(engine.stores.values())),
        "prefix_tokens_asked": tree.asked if tree else 0,
        "prefix_tokens_reused": tree.reused if tree else 0,
        "requests": engine.requests,
        "forwards": engine.forwards,
        "steps": numbers["steps"],
        "prompt_tokens": numbers["prompt_tokens"],
        "generation_tokens": numbers["tokens"],
        "drafts": numbers["drafts"],
        "drafted": numbers["drafted"],
        "accepted": numbers["accepted"],
        "accepted_per_position": totals.accepted_per_position,
    }


def find_troubles(engine: Any) -> list[str]:
    """Faults in what an idle engine keeps, as texts; empty: there are none."""
    problems = []
    if engine.live:
        return [f"{len(engine.live)} requests are in flight: check when there are none"]
    if engine.reuse is not None:
        tree = engine.reuse.tree
        problems += tree.find_troubles()
        reader_count = sum(node.segment.readers for node in tree.iterate_nodes())
        if reader_count:
            problems.append(
                f"shared segments count {reader_count} readers, and there is no request"
            )
    return problems
