"""From runs to the numbers of a document."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.bench.contenders import Contender, EngineRun, Method
from foretell.bench.peers import Run

PARTS = ("draft", "target", "host")  # of a step's time


@dataclass
class Tally:
    """Sums and lists of what one contender did in a group.

    `speeds`: by round and batch; `runs`: of all counted rounds, of which `compared` could be
    compared with plain decoding and `same` had its tokens; `first`: batch, position and plain
    tokens of the first difference; `failed`: why it is out, or "".
    """

    speeds: dict[tuple[int, int], float] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    same: int = 0
    compared: int = 0
    first: tuple[int, int, list[int]] | None = None
    timeline: list[list[float]] = field(default_factory=list)
    failed: str = ""

    def compare(self, batch: int, run: Run, plain: Run) -> None:
        self.compared += 1
        self.same += run.tokens == plain.tokens
        if run.tokens != plain.tokens and self.first is None:
            self.first = batch, _first_difference(run.tokens, plain.tokens), plain.tokens


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    for position, (a_token, b_token) in enumerate(zip(a, b, strict=False)):
        if a_token != b_token:
            return position
    return min(len(a), len(b))


def batch_speed(runs: Sequence[Run]) -> float:
    """Tokens/s of a batch together, from when its last request has its first token; 0 where none
    came after that.
    """
    start_time = max(run.times[0] for run in runs)
    end_time = max(run.times[-1] for run in runs)
    later_tokens = 0
    for run in runs:
        for token_time, token_count in zip(run.times, run.counts, strict=True):
            if token_time > start_time:
                later_tokens += token_count
    return later_tokens / (end_time - start_time) if later_tokens else 0.0


def percentile_range(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 10th and 90th percentile; None of nothing."""
    sorted_values = sorted(values)
    if not sorted_values:
        return None
    tenth_size = len(sorted_values) // 10
    return {
        "median": statistics.median(sorted_values),
        "low": sorted_values[tenth_size],
        "high": sorted_values[-1 - tenth_size],
    }


def step_timeline(run: Run) -> list[list[float]]:
    """[tokens, drafted, accepted, seconds] of each step, the first of which ends the prefill."""
    steps: list[list[float]] = []
    previous_time = 0.0
    if isinstance(run, EngineRun):
        for mark in run.marks:
            steps.append([mark.tokens, mark.drafted, mark.accepted, mark.time - previous_time])
            previous_time = mark.time
        return steps
    for token_time, token_count in zip(run.times, run.counts, strict=True):
        steps.append([token_count, 0, 0, token_time - previous_time])
        previous_time = token_time
    return steps


def group_cells(
    contenders: Sequence[Contender],
    tallies: Sequence[Tally],
    bytes_per_forward: Mapping[str, int | None],
    bandwidth: float | None,
) -> list[dict[str, Any]]:
    """The numbers of a group, of which the first contender is the baseline.

    `bytes_per_forward`: weights that a forward of each model reads; `bandwidth`: in bytes/s.
    """
    plain_tally = None
    for contender, tally in zip(contenders, tallies, strict=True):
        if contender.name == "plain":
            plain_tally = tally
    finished_cells = []
    for contender, tally in zip(contenders, tallies, strict=True):
        cell: dict[str, Any] = {
            "contender": contender.name,
            "about": contender.about,
            "baseline": contenders[0].name,
        }
        if tally.failed:
            cell |= {"status": "failed", "reason": tally.failed}
        else:
            cell |= _common_figures(contender, tally, tallies[0], plain_tally)
            engine_runs = [run for run in tally.runs if isinstance(run, EngineRun)]
            if engine_runs:  # of a peer nothing more is known
                later_tokens = sum(map(_count_later_tokens, tally.runs))
                cell |= _engine_figures(engine_runs, later_tokens, bytes_per_forward, bandwidth)
        finished_cells.append(cell)
    return finished_cells


def _common_figures(
    contender: Contender, tally: Tally, base_tally: Tally, plain_tally: Tally | None
) -> dict[str, Any]:
    """Computes the figures that every contender has."""
    runs = tally.runs
    step_count = sum(map(_count_steps, runs))
    later_tokens = sum(map(_count_later_tokens, runs))
    seconds_per_token = []
    for run in runs:
        if later_count := _count_later_tokens(run):
            seconds_per_token.append((run.times[-1] - run.times[0]) / later_count)
    identical = {"same": tally.same, "of": tally.compared} if tally.compared else None
    return {
        "status": "ok",
        "tokens_per_s": percentile_range([speed for speed in tally.speeds.values() if speed]),
        "ratio": _speed_ratio(tally, base_tally),
        "ratio_to_plain": _speed_ratio(tally, plain_tally),
        "ttft_s": percentile_range([run.times[0] for run in runs]),
        "tpot_s": percentile_range(seconds_per_token),
        "tokens": sum(len(run.tokens) for run in runs),
        "steps": step_count,
        "MAT": later_tokens / step_count if step_count else 1.0,
        "identical": identical,
        "timeline": tally.timeline,
        "cache_bytes": contender.cache_bytes if isinstance(contender, Method) else None,
    }


def _count_later_tokens(run: Run) -> int:
    """Tokens after those of the first step, which ends the prefill."""
    return len(run.tokens) - run.counts[0]


def _count_steps(run: Run) -> int:
    return run.stats.steps if isinstance(run, EngineRun) else len(run.counts) - 1


def _speed_ratio(tally: Tally, base_tally: Tally | None) -> dict[str, float] | None:
    """Ratio of speeds on the same batch in the same round; None where the baseline failed or
    nothing was long enough.
    """
    if base_tally is None or base_tally.failed:
        return None
    ratios = []
    for round_and_batch, own_speed in tally.speeds.items():
        base_speed = base_tally.speeds.get(round_and_batch)
        if own_speed and base_speed:
            ratios.append(own_speed / base_speed)
    return percentile_range(ratios)


def _engine_figures(
    runs: Sequence[EngineRun],
    later_tokens: int,
    bytes_per_forward: Mapping[str, int | None],
    bandwidth: float | None,
) -> dict[str, Any]:
    """Computes the figures that only our own engine can give."""
    step_count = max(1, sum(run.stats.steps for run in runs))
    draft_sizes: Counter[int] = Counter()
    forward_counts: Counter[str] = Counter()
    part_seconds = dict.fromkeys(PARTS, 0.0)
    for run in runs:
        first_mark, last_mark = run.marks[0], run.marks[-1]
        draft_sizes.update(mark.drafted for mark in run.marks[1:])
        for model_name, call_count in last_mark.calls.items():
            forward_counts[model_name] += call_count - first_mark.calls.get(model_name, 0)
        draft_seconds = last_mark.draft_s - first_mark.draft_s
        target_seconds = last_mark.target_s - first_mark.target_s
        part_seconds["draft"] += draft_seconds
        part_seconds["target"] += target_seconds
        part_seconds["host"] += max(
            0.0, last_mark.time - first_mark.time - draft_seconds - target_seconds
        )
    bytes_read = _sum_bytes_read(forward_counts, bytes_per_forward)
    total_seconds = sum(part_seconds.values())
    bandwidth_share = None
    if bytes_read is not None and bandwidth and total_seconds:
        bandwidth_share = bytes_read / total_seconds / bandwidth
    return {
        "drafted": sum(run.stats.drafted for run in runs),
        "accepted": sum(run.stats.accepted for run in runs),
        "by_depth": _sum_by_depth(runs),
        "drafted_a_step": {
            str(draft_size): draft_sizes[draft_size] for draft_size in sorted(draft_sizes)
        },
        "step_s": {
            model_name: part_value / step_count for model_name, part_value in part_seconds.items()
        },
        "host_share": part_seconds["host"] / total_seconds if total_seconds else None,
        "bytes_per_token": bytes_read / later_tokens
        if bytes_read is not None and later_tokens
        else None,
        "bandwidth_share": bandwidth_share,
    }


def _sum_bytes_read(
    forwards: Mapping[str, int], bytes_per_forward: Mapping[str, int | None]
) -> int | None:
    """Bytes of weights that these forwards read; None where that of one model is not known."""
    total_bytes = 0
    for model_name, forward_count in forwards.items():
        forward_bytes = bytes_per_forward.get(model_name)
        if forward_bytes is None:
            return None
        total_bytes += forward_count * forward_bytes
    return total_bytes


def _sum_by_depth(runs: Sequence[EngineRun]) -> list[list[int]]:
    """[tested, accepted] at draft depth 1, 2, ... of all runs together."""
    depths: list[list[int]] = []
    for run in runs:
        for depth, (tested_count, accepted_count) in enumerate(run.stats.by_depth):
            if depth == len(depths):
                depths.append([0, 0])
            depths[depth][0] += tested_count
            depths[depth][1] += accepted_count
    return depths
