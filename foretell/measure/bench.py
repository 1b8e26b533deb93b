"""The measurements of `foretell bench`: methods and peers side by side, cell by cell, as one JSON
document.

A cell is (model, dtype, contender, prompt set, temperature, requests, context). All cells that
differ only in the contender form a group and take turns, prompt by prompt in an order shuffled each
time, after a round that warms up and does not count; all in one process, but for peers that have
packages of their own. Each contender has engine stores of its own, emptied before every round:
nobody learns from another one's text, nor from the same text in an earlier round. A ratio is taken
prompt by prompt within one round against the first contender; of all of them the median and the
range from the 10th to the 90th percentile are kept.

Tokens/s count from when the last request of the batch has its first token: prefill is apart, on all
sides. Nothing here prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

import foretell
from foretell.api import LM
from foretell.core.context import Request
from foretell.core.engine import Engine
from foretell.core.live import Live
from foretell.core.model import Model
from foretell.core.types import Commit, Kept, Sampling
from foretell.errors import BadConfig, BadFile, ForetellError
from foretell.families.decoder import Decoder
from foretell.loading import ASSETS
from foretell.measure import peers
from foretell.measure.peers import Peer, Place, Run
from foretell.measure.profiling import numbers, processor
from foretell.measure.prompts import Prompt, read_prompts
from foretell.stats import Stats

SCHEMA = "foretell.measure.bench/1"
PROMPTS = ASSETS / "prompts"
SETS = (
    "code",
    "docs",
    "prose",
    "edits",
    "repetitive",
)  # what ships, held out of the embedded models' training
GROUP = ("model", "dtype", "set", "temperature", "requests", "context")
MIXED, LONG = "mixed", 4  # the set of prompts cut to a context's length, and how many there are
SAME = (
    "schema",
    "version",
    "settings",
    "machine",
    "versions",
)  # what a document must share to be continued
READ = 1 << 28  # bytes that measuring the memory's speed reads
# seconds before a run where processes take turns: threads of the one before go on spinning for some
PAUSE = 0.02
Tell = Callable[[str, int, int], None]  # (what is being measured, runs done, runs in all)


@dataclass(frozen=True)
class Settings:
    """What is measured. `draft`: None, or a smaller relative of every model; `peers`: as
    foretell.measure.peers names them.
    """

    models: tuple[str, ...] = ("demo",)
    draft: str | None = None
    dtypes: tuple[str, ...] = ("auto",)
    methods: tuple[str, ...] = ("plain", "auto")
    peers: tuple[str, ...] = ()
    max_new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    rounds: int = 3
    requests: tuple[int, ...] = (1,)
    contexts: tuple[
        int, ...
    ] = ()  # tokens of the prompts that are made besides, of all sets together
    device: str | None = None  # asked for; kept so that a run is not continued on another one

    def __post_init__(self) -> None:
        for name in ("models", "dtypes", "methods", "temperatures", "requests"):
            if not getattr(self, name) or len(set(getattr(self, name))) != len(getattr(self, name)):
                raise BadConfig.field(name, getattr(self, name), "at least one, each named once")
        if self.max_new_tokens < 2:
            raise BadConfig.field(
                "max_new_tokens", self.max_new_tokens, "at least 2: what is timed follows the first"
            )
        if self.rounds < 1:
            raise BadConfig.field("rounds", self.rounds, "at least 1")
        for name in ("requests", "contexts"):
            if min(getattr(self, name), default=1) < 1:
                raise BadConfig.field(name, min(getattr(self, name)), "at least 1")
        if len(set(self.contexts)) < len(self.contexts):
            raise BadConfig.field("contexts", self.contexts, "each named once")
        for temperature in self.temperatures:
            Sampling(temperature=temperature, seed=self.seed)
        for name in self.peers:
            peers.check(name)

    @property
    def specs(self) -> list[str]:
        """Our methods, plain decoding first: it is what tokens are compared with."""
        return ["plain", *(m for m in self.methods if m != "plain")]


@dataclass
class Mark:
    """A commit: `at` seconds after the batch began; `draft_s`, `target_s`, `calls`: spent by the
    request until then.
    """

    at: float
    tokens: int
    drafted: int
    accepted: int
    draft_s: float
    target_s: float
    calls: dict[str, int]


@dataclass
class Own(Run):
    """A generation by one of our methods, with what its engine noted."""

    stats: Stats
    marks: list[Mark]


class Watching(Engine):
    """An engine that notes every commit."""

    def __init__(self, lm: LM):
        super().__init__(lm.models, lm.engine.eos)
        self.costs = lm.engine.costs
        self.marks: dict[int, list[Mark]] = {}
        self.began = 0.0
        self.rows = 0  # bytes of the caches that the requests had at their ends

    def end(self, live: Live) -> None:
        parts = (part for cache in live.caches.values() for part in (*cache.keys, *cache.values))
        self.rows += sum(part.numel() * part.element_size() for part in parts)
        super().end(live)

    def _commit(self, live: Live, commit: Commit, events: Any) -> Kept:
        stats = live.ctx.stats
        before = stats.accepted
        kept = super()._commit(live, commit, events)
        mark = Mark(
            time.perf_counter() - self.began,
            len(kept.tokens),
            commit.drafted,
            stats.accepted - before,
            stats.draft_s,
            stats.target_s,
            dict(stats.calls),
        )
        self.marks.setdefault(live.index, []).append(mark)
        return kept


class Contender(Protocol):
    """Who is measured: `name` in the document, `about` in words."""

    name: str
    about: str

    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> Sequence[Run]: ...

    def forget(self) -> None:
        """Everything learnt from earlier prompts."""


class Method:
    """One of our methods, with an engine of its own. Raises BadConfig or UnknownMethod for a wrong
    spec.
    """

    def __init__(self, lm: LM, spec: str):
        self.name, self.about, self.lm = spec, "foretell", lm
        self.label, self.strategy = lm.resolve(spec)
        if spec == "auto":
            self.about = f"stands for {lm.auto}, {'the default' if lm.auto == lm.default else 'as foretell tune found'}"
        self.engine, self.cached = Watching(lm), 0  # bytes of caches, of the largest batch so far

    def forget(self) -> None:
        self.engine.stores.clear()

    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> list[Run]:
        """One request a prompt, all in one batch, of seeds `seed`, `seed` + 1, ... Raises the first
        error.
        """
        engine, text = self.engine, self.lm.decode if self.lm.tokenizer is not None else None
        engine.marks.clear()
        engine.rows = 0
        lives: list[Live] = []
        try:
            for k, ids in enumerate(batch):
                how = Sampling(
                    max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + k
                )
                lives.append(engine.add(Request(ids, self.strategy, how, self.label, text)))
            engine.began = time.perf_counter()
            for _ in engine.run():
                pass
        finally:
            for live in lives:
                engine.end(live)
        for live in lives:
            if live.error is not None:
                raise live.error
        self.cached = max(self.cached, engine.rows)
        return [self._own(live) for live in lives]

    def _own(self, live: Live) -> Own:
        stats, marks, tokens = live.ctx.stats, self.engine.marks[live.index], live.ctx.output
        times, counts = [m.at for m in marks], [m.tokens for m in marks]
        if sum(counts) != len(
            tokens
        ):  # other branches were written too; which is the answer was known at the end
            times, counts = (
                [times[0], times[-1]],
                [stats.first_tokens, len(tokens) - stats.first_tokens],
            )
        return Own(tokens, times, counts, stats, marks)


class Other:
    """A peer, which takes one request at a time and learns nothing."""

    def __init__(self, peer: Peer):
        self.name, self.about, self.peer = peer.name, peer.about, peer

    def forget(self) -> None:
        pass

    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> list[Run]:
        return [self.peer.run(batch[0], max_new_tokens, temperature, seed)]


def speed(runs: Sequence[Run]) -> float:
    """Tokens/s of a batch together, from when its last request has its first token; 0: none came
    after that.
    """
    begin, end = max(run.times[0] for run in runs), max(run.times[-1] for run in runs)
    later = sum(
        count for run in runs for at, count in zip(run.times, run.counts, strict=True) if at > begin
    )
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


@dataclass
class Tally:
    """What is known of one contender in a group."""

    speeds: dict[tuple[int, int], float] = field(default_factory=dict)  # by round and batch
    runs: list[Run] = field(default_factory=list)  # of all counted rounds
    same: int = 0  # of them with plain decoding's tokens
    compared: int = 0
    # batch, position and plain tokens of the first divergence
    first: tuple[int, int, list[int]] | None = None
    timeline: list[list[float]] = field(default_factory=list)
    failed: str = ""

    def compare(self, batch: int, mine: Run, plain: Run) -> None:
        self.compared += 1
        self.same += mine.tokens == plain.tokens
        if mine.tokens != plain.tokens and self.first is None:
            pairs = enumerate(zip(mine.tokens, plain.tokens, strict=False))
            at = next(
                (i for i, (a, b) in pairs if a != b), min(len(mine.tokens), len(plain.tokens))
            )
            self.first = batch, at, plain.tokens


def interleave(
    contenders: Sequence[Contender],
    batches: Sequence[list[list[int]]],
    settings: Settings,
    temperature: float,
    tell: Callable[[str], None] = lambda name: None,
) -> list[Tally]:
    """Runs every batch with every contender, `settings.rounds` times after a warm-up; `tell(name)`
    after each run.

    A contender that raises is out of the group, with its reason; the others go on.
    """
    order, tallies = random.Random(settings.seed), [Tally() for _ in contenders]
    plain = next((i for i, c in enumerate(contenders) if c.name == "plain"), None)
    for turn in range(settings.rounds + 1):
        for contender in contenders:
            contender.forget()
        for number, batch in enumerate(batches):
            found: dict[int, Sequence[Run]] = {}
            for i in order.sample(range(len(contenders)), len(contenders)):
                if not tallies[i].failed:
                    time.sleep(PAUSE if settings.peers else 0.0)
                    try:
                        found[i] = contenders[i].run(
                            batch, settings.max_new_tokens, temperature, settings.seed
                        )
                    except Exception as error:  # a peer may raise anything; its cell alone is lost
                        tallies[i].failed = reason(error)
                tell(contenders[i].name)
            for i, runs in found.items() if turn else ():
                tally = tallies[i]
                tally.speeds[turn, number] = speed(runs)
                tally.runs += runs
                if not tally.timeline:
                    tally.timeline = timeline(runs[0])
                if plain in found and i != plain:
                    for mine, reference in zip(runs, found[plain], strict=True):
                        tally.compare(number, mine, reference)
    return tallies


def reason(error: BaseException) -> str:
    """One line."""
    text = str(error) if isinstance(error, ForetellError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def timeline(run: Run) -> list[list[float]]:
    """[tokens, drafted, accepted, seconds] of each step, the first one ending the prefill."""
    steps = (
        run.marks
        if isinstance(run, Own)
        else [Mark(t, n, 0, 0, 0, 0, {}) for t, n in zip(run.times, run.counts, strict=True)]
    )
    ends = [0.0, *(step.at for step in steps)]
    return [
        [s.tokens, s.drafted, s.accepted, s.at - before]
        for s, before in zip(steps, ends, strict=False)
    ]


def cells(
    contenders: Sequence[Contender],
    tallies: Sequence[Tally],
    reads: dict[str, int | None],
    bandwidth: float | None,
) -> list[dict[str, Any]]:
    """The numbers of a group. `reads`: bytes of weights a forward of each model reads; `bandwidth`:
    bytes/s.
    """
    base, found = tallies[0], list[dict[str, Any]]()
    plain = next((t for c, t in zip(contenders, tallies, strict=True) if c.name == "plain"), None)
    for contender, tally in zip(contenders, tallies, strict=True):
        cell: dict[str, Any] = {
            "contender": contender.name,
            "about": contender.about,
            "baseline": contenders[0].name,
        }
        if tally.failed:
            found.append(cell | {"status": "failed", "reason": tally.failed})
            continue
        steps = sum(_steps(run) for run in tally.runs)
        later = sum(len(run.tokens) - run.counts[0] for run in tally.runs)
        found.append(
            cell
            | {
                "status": "ok",
                "tokens_per_s": spread([s for s in tally.speeds.values() if s]),
                "ratio": _ratio(tally, base),
                "ratio_to_plain": _ratio(tally, plain),
                "ttft_s": spread([run.times[0] for run in tally.runs]),
                "tpot_s": spread(
                    [
                        (r.times[-1] - r.times[0]) / (len(r.tokens) - r.counts[0])
                        for r in tally.runs
                        if len(r.tokens) > r.counts[0]
                    ]
                ),
                "tokens": sum(len(run.tokens) for run in tally.runs),
                "steps": steps,
                "MAT": later / steps if steps else 1.0,
                "identical": {"same": tally.same, "of": tally.compared} if tally.compared else None,
                "timeline": tally.timeline,
                "cache_bytes": contender.cached if isinstance(contender, Method) else None,
                **_inside(
                    [run for run in tally.runs if isinstance(run, Own)], later, reads, bandwidth
                ),
            }
        )
    return found


def _ratio(tally: Tally, base: Tally | None) -> dict[str, float] | None:
    """Of speeds on the same batch in the same round; None where the other one failed or nothing was
    long enough.
    """
    if base is None or base.failed:
        return None
    return spread(
        [s / base.speeds[key] for key, s in tally.speeds.items() if s and base.speeds.get(key)]
    )


def _steps(run: Run) -> int:
    return run.stats.steps if isinstance(run, Own) else len(run.counts) - 1


def _inside(
    runs: Sequence[Own], later: int, reads: dict[str, int | None], bandwidth: float | None
) -> dict[str, Any]:
    """What only our own engine tells; of a peer nothing is known."""
    if not runs:
        return {}
    steps = max(1, sum(run.stats.steps for run in runs))
    depths: list[list[int]] = []
    sizes: Counter[int] = Counter()
    forwards: Counter[str] = Counter()
    spent = {"draft": 0.0, "target": 0.0, "host": 0.0}
    for run in runs:
        for i, (tested, accepted) in enumerate(run.stats.by_depth):
            depths += [[0, 0]] * (i == len(depths))
            depths[i] = [depths[i][0] + tested, depths[i][1] + accepted]
        first, last = run.marks[0], run.marks[-1]
        sizes.update(mark.drafted for mark in run.marks[1:])
        forwards.update({name: n - first.calls.get(name, 0) for name, n in last.calls.items()})
        draft, target = last.draft_s - first.draft_s, last.target_s - first.target_s
        spent["draft"] += draft
        spent["target"] += target
        spent["host"] += max(0.0, last.at - first.at - draft - target)
    sizes_known = all(reads.get(name) is not None for name in forwards)
    read = sum(n * (reads.get(name) or 0) for name, n in forwards.items()) if sizes_known else None
    seconds = sum(spent.values())
    return {
        "drafted": sum(run.stats.drafted for run in runs),
        "accepted": sum(run.stats.accepted for run in runs),
        "by_depth": depths,
        "drafted_a_step": {str(n): sizes[n] for n in sorted(sizes)},
        "step_s": {name: value / steps for name, value in spent.items()},
        "host_share": spent["host"] / seconds if seconds else None,
        "bytes_per_token": read / later if read is not None and later else None,
        "bandwidth_share": read / seconds / bandwidth
        if read is not None and bandwidth and seconds
        else None,
    }


def weight_bytes(model: Model | None) -> int | None:
    """Bytes of weights that a forward reads, each tensor once; a table of embeddings only counts
    where it is the head.

    An upper bound for a mixture of experts or a forward of some layers. None where the model does
    not show its weights.
    """
    if not isinstance(model, Decoder):
        known: int | None = getattr(model, "weight_bytes", None)
        return known
    sizes = {p.data_ptr(): p.numel() * p.element_size() for p in model.hf.parameters()}
    table: Any = model.hf.get_input_embeddings()
    head: Any = model.hf.get_output_embeddings()
    if table.weight.data_ptr() != head.weight.data_ptr():
        sizes.pop(table.weight.data_ptr(), None)
    return sum(sizes.values())


@torch.inference_mode()
def measure_bandwidth(device: torch.device | str = "cpu", size: int = READ) -> float:
    """Bytes/s that this machine reads from memory: the best of a few sums, copies and matrix-vector
    products.

    `size` bytes are read each time; a cache that holds them makes the figure larger than the
    memory's.
    """
    data = torch.ones(size // 4, device=device)
    width = 4096 if size >= 1 << 25 else 64
    matrix, vector = (
        data.view(torch.bfloat16).view(-1, width),
        torch.ones(width, dtype=torch.bfloat16, device=device),
    )
    other = torch.empty_like(data[: len(data) // 2])
    ways: list[Callable[[], Any]] = [
        lambda: data.sum(),
        lambda: other.copy_(data[: len(other)]),
        lambda: matrix @ vector,
    ]
    best = float("inf")
    for _ in range(4):
        for way in ways:
            start = time.perf_counter()
            way()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    return size / best


def forget_peak() -> None:
    """Lets the system note the largest memory anew, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Largest resident bytes of this process since `forget_peak`, or ever; None where the system
    does not tell.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def held_bytes(model: Model | None) -> int:
    """Bytes of all its weights, each tensor once; of a .gguf file, those that a forward reads."""
    if not isinstance(model, Decoder):
        return weight_bytes(model) or 0
    parts = model.hf.parameters()
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in parts}.values())


def cut(lm: LM, prompts: Sequence[Prompt], context: int, new: int) -> list[list[int]]:
    """Prompts of exactly `context` tokens: a few texts, each behind as much of the others as there
    is room for.

    They end alike whatever the context, so that only its length differs. Nothing is repeated.
    Raises BadConfig.
    """
    target = lm.models["target"]
    if context + new > target.context:
        raise BadConfig(
            f"a context of {context} and {new} new tokens: {target.name} holds {target.context}; take less"
        )
    texts = [
        p if isinstance(p, str) else "\n\n".join(str(m["content"]) for m in p) for p in prompts
    ]
    ids = [lm.encode(text, special=False) for text in texts]
    gap = lm.encode("\n\n", special=False)
    room = sum(map(len, ids)) + len(gap) * (len(ids) - 1)
    if room < context:
        raise BadConfig(
            f"a context of {context}: all prompts together have {room} tokens; give more or longer ones"
        )
    head = lm.encode(texts[0])[: -len(ids[0])]  # what the tokenizer puts before a text
    found = []
    for k in range(min(LONG, len(ids))):
        last = k * len(ids) // min(LONG, len(ids))
        order = [*ids[last + 1 :], *ids[: last + 1]]
        whole = [token for i, part in enumerate(order) for token in ([*gap, *part] if i else part)]
        found.append([*head, *whole[len(whole) - context + len(head) :]])
    return found


def read_sets(names: Sequence[str | Path]) -> dict[str, list[Prompt]]:
    """Prompt sets by name: files, or names of those that ship; nothing means all of these. Raises
    BadConfig.
    """
    found: dict[str, list[Prompt]] = {}
    for name in names or SETS:
        path = PROMPTS / f"{name}.jsonl" if str(name) in SETS else Path(name)
        if path.stem in found:
            raise BadConfig(
                f"--prompts {name}: there is already a set {path.stem!r}; rename the file"
            )
        found[path.stem] = read_prompts(path)
    return found


def opened(path: Path) -> dict[str, Any] | None:
    """The document of an earlier run, or None where there is no file. Raises BadFile for anything
    else.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["schema"] != SCHEMA or not isinstance(document["cells"], list):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(
            f"{path}: exists and is no document of foretell bench; name another file"
        ) from error
    return dict(document)


def write(document: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def begin(
    settings: Settings, sets: dict[str, list[Prompt]], path: Path | None = None
) -> dict[str, Any]:
    """A document without cells, or that of `path` if it was begun the same way. Raises BadFile
    where it was not.
    """
    digests = {
        name: hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
        for name, rows in sets.items()
    }
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "version": foretell.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": dataclasses.asdict(settings) | {"sets": digests},
        "bandwidth": None,
        "peak_memory": None,
        "memory_limit": None,
        "models": [],
        "cells": [],
    }
    document = json.loads(json.dumps(document))  # tuples become lists, as in a file
    earlier = opened(path) if path else None
    if earlier is None:
        return document
    for name in SAME:
        old, new = earlier.get(name), document[name]
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                key = next(k for k in [*new, *old] if old.get(k) != new.get(k))
                name, old, new = f"{name}.{key}", old.get(key), new.get(key)
            raise BadFile(
                f"{path}: was measured with another {name} ({old} there, {new} here); name another file"
            )
    return earlier


def bench(
    settings: Settings,
    sets: dict[str, list[Prompt]],
    load: Callable[[str, str], LM],
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the groups it lacks; `save(document)` is called whenever
    one has ended.

    `load(model, dtype)` gives the models. Raises what it raises if there is only one; of several,
    the others go on.
    """

    def group(cell: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(cell.get(key) for key in GROUP)

    # A group with a failed cell is run again as a whole: its ratios are of one run.
    again = {group(cell) for cell in document["cells"] if cell["status"] == "failed"}
    ran = {group(cell) for cell in document["cells"]} - again
    every = [prompt for rows in sets.values() for prompt in rows]

    def rows(name: str, context: int | None) -> int:
        return len(sets[name]) if context is None else min(LONG, len(every))

    names = len(settings.specs) + 3 * len(settings.peers)
    places = [(model, dtype) for model in settings.models for dtype in settings.dtypes]
    inner: list[tuple[str, float, int, int | None]] = [
        (name, t, n, None)
        for name in sets
        for t in settings.temperatures
        for n in settings.requests
    ]
    inner += [
        (MIXED, t, settings.requests[0], c)
        for t in settings.temperatures
        for c in settings.contexts
    ]
    weights = {
        (name, n, c): (settings.rounds + 1) * -(-rows(name, c) // n) * names
        for name, _, n, c in inner
    }
    total, done = sum(weights[name, n, c] for name, _, n, c in inner) * len(places), 0
    for model, dtype in places:
        lm: LM | None = None
        trouble, others = "", list[Other]()
        for name, temperature, requests, context in inner:
            about = dict(
                zip(GROUP, (model, dtype, name, temperature, requests, context), strict=True)
            )
            if tuple(about.values()) not in ran:
                if lm is None and not trouble:
                    try:
                        lm = load(model, dtype)
                    except ForetellError as error:
                        if len(places) == 1:
                            raise
                        trouble = reason(error)
                    else:
                        _describe(
                            document, model, dtype, lm
                        )  # before peers are there to disturb what it measures
                        others, broken = _opened_peers(settings, model, dtype, lm)
                ended: list[dict[str, Any]]
                if lm is None:
                    ended = [_failed(spec, trouble) for spec in settings.specs]
                else:
                    counter = itertools.count(done + 1)

                    what = f"{model} {name}" + (f" {context}" if context else "")

                    def step(who: str, counter: Iterator[int] = counter, what: str = what) -> None:
                        tell(f"{what}: {who}", min(total, next(counter)), total)

                    who = others if requests == 1 else []
                    prompts = sets[name] if context is None else every
                    ended = _group(
                        lm, settings, prompts, temperature, requests, who, document, step, context
                    )
                    ended += broken if requests == 1 else []
                at = next(
                    (i for i, c in enumerate(document["cells"]) if group(c) == group(about)), None
                )
                document["cells"] = [c for c in document["cells"] if group(c) != group(about)]
                at = len(document["cells"]) if at is None else at
                document["cells"][at:at] = [
                    about | {"prompts": rows(name, context)} | cell for cell in ended
                ]
                document["peak_memory"] = (
                    max(document["peak_memory"] or 0, peak_memory() or 0) or None
                )
                if lm is not None:
                    _limit(document, lm, ended)
                save(document)
            done += weights[name, requests, context]
            tell(f"{model} {name}", done, total)
    return document


def _limit(document: dict[str, Any], lm: LM, ended: Sequence[dict[str, Any]]) -> None:
    """Notes what memory should be enough: weights x 1.15, the caches, and 300 MB for the program;
    of the largest.
    """
    held = sum(held_bytes(model) for model in lm.models.values())
    rows = max((cell.get("cache_bytes") or 0 for cell in ended), default=0)
    old = document.get("memory_limit") or {"weights": 0, "caches": 0}
    limit = {"weights": max(held, old["weights"]), "caches": max(rows, old["caches"])}
    document["memory_limit"] = limit | {
        "bytes": int(1.15 * limit["weights"]) + limit["caches"] + 300_000_000
    }


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"contender": name, "about": "", "baseline": None, "status": "failed", "reason": why}


def _opened_peers(
    settings: Settings, model: str, dtype: str, lm: LM
) -> tuple[list[Other], list[dict[str, Any]]]:
    """The peers that are ready, and a failed cell for each that is not."""
    draft = settings.draft
    if draft is None and model == "demo":
        draft = "demo-draft"
    folder = str(ASSETS / draft) if draft == "demo-draft" else draft
    target = lm.models["target"]
    kind = dtype if dtype == "int8" else numbers(target)  # `auto` is what was stored
    place = Place(
        str(lm.path or model),
        folder,
        kind,
        str(target.device),
        torch.get_num_threads(),
        lm.engine.eos,
    )
    ready, broken = list[Other](), []
    for name in settings.peers:
        try:
            ready += [Other(peer) for peer in peers.contenders(name, place)]
        except Exception as error:  # another library may raise anything
            broken.append(_failed(name, reason(error)))
    return ready, broken


def _describe(document: dict[str, Any], model: str, dtype: str, lm: LM) -> None:
    """Notes the model's cost curve and size, and once the memory's speed."""
    target = lm.models["target"]
    if document["bandwidth"] is None:
        document["bandwidth"] = {
            "bytes_per_s": measure_bandwidth(target.device),
            "device": str(target.device),
        }
        forget_peak()  # what that took is no matter of decoding
    found = lm.measure()
    document["models"] = [
        m for m in document["models"] if (m["model"], m["dtype"]) != (model, dtype)
    ]
    document["models"].append(
        {
            "model": model,
            "dtype": dtype,
            "computed_in": numbers(target),
            "about": found["about"],
            "seconds": {
                str(r): {str(n): s for n, s in line.items()} for r, line in found["seconds"].items()
            },
            "weight_bytes": weight_bytes(target),
            "draft_weight_bytes": weight_bytes(lm.models.get("draft")),
        }
    )


def _group(
    lm: LM,
    settings: Settings,
    prompts: Sequence[Prompt],
    temperature: float,
    requests: int,
    others: Sequence[Other],
    document: dict[str, Any],
    tell: Callable[[str], None],
    context: int | None = None,
) -> list[dict[str, Any]]:
    """The finished cells of one group, the first contender being what the others are measured
    against.
    """
    try:
        if context is None:
            texts = [lm._encode(prompt) for prompt in prompts]
        else:
            texts = cut(lm, prompts, context, settings.max_new_tokens)
    except ForetellError as error:
        return [
            _failed(name, reason(error)) for name in [*(o.name for o in others), *settings.specs]
        ]
    contenders, broken = list[Contender](others), []
    for spec in settings.specs:
        try:
            contenders.append(Method(lm, spec))
        except ForetellError as error:
            broken.append(_failed(spec, reason(error)))
    # A set smaller than a batch fills it by beginning again.
    batches = [
        [texts[(i + k) % len(texts)] for k in range(requests)]
        for i in range(0, len(texts), requests)
    ]
    tallies = interleave(contenders, batches, settings, temperature, tell)
    reads = {name: weight_bytes(model) for name, model in lm.models.items()}
    if requests > 1:  # a shared forward is counted by everybody in it
        reads = dict.fromkeys(reads)
    ended = cells(contenders, tallies, reads, document["bandwidth"]["bytes_per_s"])
    for cell, tally in zip(ended, tallies, strict=True):
        if tally.first is not None and cell.get("identical"):
            cell["identical"] |= _divergence(lm.models["target"], batches, tally.first)
    return ended + broken


def _divergence(
    model: Model, batches: Sequence[list[list[int]]], first: tuple[int, int, list[int]]
) -> dict[str, Any]:
    """Where the first difference is, and how far apart the target's two best logits are there."""
    number, at, plain = first
    found: dict[str, Any] = {"batch": number, "position": at, "margin": None}
    if len(batches[number]) == 1:
        best = model.score([*batches[number][0], *plain[:at]])[0].topk(2).values.tolist()
        found["margin"] = best[0] - best[1]
    return found
