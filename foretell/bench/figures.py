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
    """What is known of one contender in a group.

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
    for position, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return position
    return min(len(a), len(b))


def speed(runs: Sequence[Run]) -> float:
    """Tokens/s of a batch together, from when its last request has its first token; 0 where none
    came after that.
    """
    begin = max(run.times[0] for run in runs)
    end = max(run.times[-1] for run in runs)
    later = 0
    for run in runs:
        for time, count in zip(run.times, run.counts, strict=True):
            if time > begin:
                later += count
    return later / (end - begin) if later else 0.0


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 10th and 90th percentile; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    tenth = len(ordered) // 10
    return {
        "median": statistics.median(ordered),
        "low": ordered[tenth],
        "high": ordered[-1 - tenth],
    }


def timeline(run: Run) -> list[list[float]]:
    """[tokens, drafted, accepted, seconds] of each step, the first of which ends the prefill."""
    steps: list[list[float]] = []
    before = 0.0
    if isinstance(run, EngineRun):
        for mark in run.marks:
            steps.append([mark.tokens, mark.drafted, mark.accepted, mark.time - before])
            before = mark.time
        return steps
    for time, count in zip(run.times, run.counts, strict=True):
        steps.append([count, 0, 0, time - before])
        before = time
    return steps


def cells(
    contenders: Sequence[Contender],
    tallies: Sequence[Tally],
    reads: Mapping[str, int | None],
    bandwidth: float | None,
) -> list[dict[str, Any]]:
    """The numbers of a group, of which the first contender is the baseline.

    `reads`: bytes of weights that a forward of each model reads; `bandwidth`: in bytes/s.
    """
    plain = None
    for contender, tally in zip(contenders, tallies, strict=True):
        if contender.name == "plain":
            plain = tally
    made = []
    for contender, tally in zip(contenders, tallies, strict=True):
        cell: dict[str, Any] = {
            "contender": contender.name,
            "about": contender.about,
            "baseline": contenders[0].name,
        }
        if tally.failed:
            cell |= {"status": "failed", "reason": tally.failed}
        else:
            cell |= _figures(contender, tally, tallies[0], plain)
            engine_runs = [run for run in tally.runs if isinstance(run, EngineRun)]
            if engine_runs:  # of a peer nothing more is known
                later = sum(map(_later, tally.runs))
                cell |= _engine_figures(engine_runs, later, reads, bandwidth)
        made.append(cell)
    return made


def _figures(
    contender: Contender, tally: Tally, base: Tally, plain: Tally | None
) -> dict[str, Any]:
    """What is known of every contender."""
    runs = tally.runs
    steps = sum(map(_steps, runs))
    later = sum(map(_later, runs))
    token_seconds = []
    for run in runs:
        if count := _later(run):
            token_seconds.append((run.times[-1] - run.times[0]) / count)
    identical = {"same": tally.same, "of": tally.compared} if tally.compared else None
    return {
        "status": "ok",
        "tokens_per_s": spread([speed for speed in tally.speeds.values() if speed]),
        "ratio": _ratio(tally, base),
        "ratio_to_plain": _ratio(tally, plain),
        "ttft_s": spread([run.times[0] for run in runs]),
        "tpot_s": spread(token_seconds),
        "tokens": sum(len(run.tokens) for run in runs),
        "steps": steps,
        "MAT": later / steps if steps else 1.0,
        "identical": identical,
        "timeline": tally.timeline,
        "cache_bytes": contender.cache_bytes if isinstance(contender, Method) else None,
    }


def _later(run: Run) -> int:
    """Tokens after those of the first step, which ends the prefill."""
    return len(run.tokens) - run.counts[0]


def _steps(run: Run) -> int:
    return run.stats.steps if isinstance(run, EngineRun) else len(run.counts) - 1


def _ratio(tally: Tally, base: Tally | None) -> dict[str, float] | None:
    """Of speeds on the same batch in the same round; None where the other one failed or nothing was
    long enough.
    """
    if base is None or base.failed:
        return None
    ratios = []
    for key, value in tally.speeds.items():
        other = base.speeds.get(key)
        if value and other:
            ratios.append(value / other)
    return spread(ratios)


def _engine_figures(
    runs: Sequence[EngineRun],
    later: int,
    reads: Mapping[str, int | None],
    bandwidth: float | None,
) -> dict[str, Any]:
    """What only our own engine tells."""
    steps = max(1, sum(run.stats.steps for run in runs))
    sizes: Counter[int] = Counter()
    forwards: Counter[str] = Counter()
    spent = dict.fromkeys(PARTS, 0.0)
    for run in runs:
        first, last = run.marks[0], run.marks[-1]
        sizes.update(mark.drafted for mark in run.marks[1:])
        for name, count in last.calls.items():
            forwards[name] += count - first.calls.get(name, 0)
        draft = last.draft_s - first.draft_s
        target = last.target_s - first.target_s
        spent["draft"] += draft
        spent["target"] += target
        spent["host"] += max(0.0, last.time - first.time - draft - target)
    read = _bytes_read(forwards, reads)
    seconds = sum(spent.values())
    bandwidth_share = None
    if read is not None and bandwidth and seconds:
        bandwidth_share = read / seconds / bandwidth
    return {
        "drafted": sum(run.stats.drafted for run in runs),
        "accepted": sum(run.stats.accepted for run in runs),
        "by_depth": _by_depth(runs),
        "drafted_a_step": {str(size): sizes[size] for size in sorted(sizes)},
        "step_s": {name: value / steps for name, value in spent.items()},
        "host_share": spent["host"] / seconds if seconds else None,
        "bytes_per_token": read / later if read is not None and later else None,
        "bandwidth_share": bandwidth_share,
    }


def _bytes_read(forwards: Mapping[str, int], reads: Mapping[str, int | None]) -> int | None:
    """Bytes of weights that these forwards read; None where that of one model is not known."""
    total = 0
    for name, count in forwards.items():
        one = reads.get(name)
        if one is None:
            return None
        total += count * one
    return total


def _by_depth(runs: Sequence[EngineRun]) -> list[list[int]]:
    """[tested, accepted] at draft depth 1, 2, ... of all runs together."""
    depths: list[list[int]] = []
    for run in runs:
        for i, (tested, accepted) in enumerate(run.stats.by_depth):
            if i == len(depths):
                depths.append([0, 0])
            depths[i][0] += tested
            depths[i][1] += accepted
    return depths
