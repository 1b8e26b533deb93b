"""Measures: set by set, round by round, prompt by prompt, one contender at a time."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.sides import Contender, Sides
from foretell.bench.hardware import measure_bandwidth
from foretell.bench.peers import Run
from foretell.bench.turns import PAUSE, one_line_reason
from foretell.errors import BadConfig, RequestFailed

LONG = 2000  # tokens of the prompts whose prefill is measured
STRIDE = 331  # tokens between the beginnings of two of them: none shares its first tokens
ROWS = ("1", "2", "4", "8", "16", "32")  # of steps whose cost is noted


@dataclass(frozen=True)
class Settings:
    """How much is measured. `rounds`: those that count, after one that warms up."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0
    rounds: int = 3


def row(contender: str, prompt: int, turn: int, run: Run) -> list[Any]:
    """A run as the document has it, see document.COLUMNS."""
    later = sum(run.counts[1:])
    seconds = run.times[-1] - run.times[0]
    speed = later / seconds if later and seconds > 0 else 0.0
    mat = later / max(1, len(run.counts) - 1)
    digest = hashlib.sha256(repr(run.tokens).encode()).hexdigest()[:8]
    return [contender, prompt, turn, round(speed, 2), round(mat, 3), round(run.times[0], 5), digest]


def measure_set(
    sides: Sides, prompts: Sequence[list[int]], settings: Settings, part: dict[str, Any]
) -> list[list[Any]]:
    """The rows of one set. A contender that fails is out, with its reason."""
    rows: list[list[Any]] = []
    order = random.Random(settings.seed)
    for turn in range(settings.rounds + 1):
        part["memory_rate"].append(round(measure_bandwidth()))
        for worker in {id(c.worker): c.worker for c in sides.contenders if c.ours}.values():
            worker.ask({"forget": True})
        for number, ids in enumerate(prompts):
            for contender in order.sample(sides.contenders, len(sides.contenders)):
                run = _tried(sides, contender, ids, settings.max_new_tokens, settings)
                if turn and run is not None:
                    rows.append(row(contender.name, number, turn, run))
    return rows


def measure_prefill(
    sides: Sides, texts: Sequence[list[int]], settings: Settings
) -> list[list[Any]]:
    """[contender, round, seconds] of the prefill of LONG tokens, without drafts.

    `texts`: of which the long prompts are made. No two prompts begin alike, since some peers keep
    what they have computed of a beginning. Raises BadConfig where the texts are too short.
    """
    corpus = [token for text in texts for token in text]
    rows: list[list[Any]] = []
    order = random.Random(settings.seed)
    for turn in range(settings.rounds + 1):
        start = turn * STRIDE
        ids = corpus[start : start + LONG]
        if len(ids) < LONG:
            most = (len(corpus) - LONG) // STRIDE
            raise BadConfig.field("--rounds", settings.rounds, f"at most {most}: no prompt twice")
        plain = [contender for contender in sides.contenders if contender.plain]
        for contender in order.sample(plain, len(plain)):
            run = _tried(sides, contender, ids, 2, settings)
            if turn and run is not None:
                rows.append([contender.name, turn, round(run.times[0], 4)])
    return rows


def _tried(
    sides: Sides, contender: Contender, ids: list[int], tokens: int, settings: Settings
) -> Run | None:
    time.sleep(PAUSE)
    try:
        return contender.run(ids, tokens, settings.temperature, settings.seed)
    except RequestFailed as error:
        sides.drop(contender, one_line_reason(error))
        return None


def first_tokens(sides: Sides, ids: list[int]) -> None:
    """Notes, of every process, the seconds until its first request has its first token."""
    seen = set()
    for contender in list(sides.contenders):
        worker = contender.worker
        if worker.name in seen:
            continue
        seen.add(worker.name)
        time.sleep(PAUSE)
        try:
            if contender.ours:
                seconds = worker.ask({"first": ids})["seconds"]
            else:
                seconds = worker.run(ids, 2, 0.0, 0).times[0]
        except RequestFailed as error:
            sides.drop(contender, one_line_reason(error))
            continue
        sides.opened[worker.name]["first_token_s"] = seconds


def step_costs(sides: Sides) -> dict[str, dict[str, float]]:
    """Seconds of our steps by their number of rows, by process."""
    costs = {}
    for worker in {c.worker.name: c.worker for c in sides.contenders if c.ours}.values():
        seconds: Mapping[str, float] = worker.ask({"steps": True})["seconds"]
        costs[worker.name] = {rows: seconds[rows] for rows in ROWS if rows in seconds}
    return costs


def note_peaks(sides: Sides) -> None:
    """Notes the most memory that each process ever had."""
    for worker in sides.workers:
        memory = worker.memory()
        sides.opened[worker.name]["peak_bytes"] = memory[1] if memory else None
