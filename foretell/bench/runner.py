"""Runs a bench: group by group, each as soon as its model is loaded, into a document."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from foretell.api.lm import LM
from foretell.bench import peers
from foretell.bench.contenders import Contender, Method, PeerContender
from foretell.bench.figures import Tally, cells
from foretell.bench.hardware import (
    forget_peak,
    held_bytes,
    measure_bandwidth,
    peak_memory,
    weight_bytes,
)
from foretell.bench.peers import Place
from foretell.bench.prompts import Prompt
from foretell.bench.sets import LONG, MIXED, cut, prompt_ids
from foretell.bench.settings import Settings
from foretell.bench.turns import interleave, reason
from foretell.core.model import Model
from foretell.engine.cost_profile import numbers
from foretell.errors import ForetellError
from foretell.loading.names import EMBEDDED
from foretell.ops.assets import ASSETS

WAYS = 3  # in which a peer decodes, at most
SPARE = 1.15  # times the weights, and
PROGRAM = 300_000_000  # bytes for the program itself: memory that should be enough
Cell = dict[str, Any]
Sets = Mapping[str, Sequence[Prompt]]  # prompts by name of the set
Load = Callable[[str, str], LM]  # (model, dtype)
Tell = Callable[[str, int, int], None]  # (what is being measured, runs done, runs in all)


class Group(NamedTuple):
    """What the cells of a group share, by the names that a document uses."""

    model: str
    dtype: str
    set: str
    temperature: float
    requests: int
    context: int | None  # tokens of the prompts; None: as they are

    @classmethod
    def of(cls, cell: Mapping[str, Any]) -> Group:
        return cls(*(cell.get(name) for name in cls._fields))  # type: ignore[arg-type]


@dataclass
class Loaded:
    """A model that is ready, the peers beside it, and a failed cell for each that is not."""

    lm: LM
    others: list[PeerContender] = field(default_factory=list)
    broken: list[Cell] = field(default_factory=list)


def _silent(what: str, done: int, total: int) -> None:
    pass


def bench(
    settings: Settings,
    sets: Sets,
    load: Load,
    document: dict[str, Any],
    tell: Tell = _silent,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the groups it lacks, and returns it.

    Calls `save(document)` whenever a group has ended. `load(model, dtype)` gives the models; what
    it raises is raised if there is only one, while of several the others go on.
    """
    _Bench(settings, sets, load, document, tell, save).run()
    return document


class _Bench:
    """A bench in progress."""

    def __init__(
        self,
        settings: Settings,
        sets: Sets,
        load: Load,
        document: dict[str, Any],
        tell: Tell,
        save: Callable[[dict[str, Any]], None],
    ):
        self.settings = settings
        self.sets = sets
        self.load = load
        self.document = document
        self.tell = tell
        self.save = save
        self.every = [prompt for prompts in sets.values() for prompt in prompts]
        self.places = list(itertools.product(settings.models, settings.dtypes))
        groups = [group for place in self.places for group in self._groups(*place)]
        self.done = 0
        self.total = sum(map(self._runs, groups))

    def run(self) -> None:
        # A group with a failed cell is run again as a whole: its ratios are of one run.
        known = self.document["cells"]
        failed = {Group.of(cell) for cell in known if cell["status"] == "failed"}
        finished = {Group.of(cell) for cell in known} - failed
        for model, dtype in self.places:
            loaded: Loaded | None = None
            trouble = ""
            for group in self._groups(model, dtype):
                if group not in finished:
                    if loaded is None and not trouble:
                        loaded, trouble = self._load(model, dtype)
                    if loaded is None:
                        ended = [_failed(spec, trouble) for spec in self.settings.specs]
                    else:
                        ended = self._measure(group, loaded)
                    self._keep(group, ended, loaded)
                self.done += self._runs(group)
                self.tell(f"{model} {group.set}", self.done, self.total)

    def _groups(self, model: str, dtype: str) -> list[Group]:
        settings = self.settings
        plain = itertools.product(self.sets, settings.temperatures, settings.requests)
        groups = [Group(model, dtype, name, t, requests, None) for name, t, requests in plain]
        requests = settings.requests[0]
        for t, context in itertools.product(settings.temperatures, settings.contexts):
            groups.append(Group(model, dtype, MIXED, t, requests, context))
        return groups

    def _prompt_count(self, group: Group) -> int:
        if group.context is None:
            return len(self.sets[group.set])
        return min(LONG, len(self.every))

    def _runs(self, group: Group) -> int:
        """How many runs it takes, the warm-up's too."""
        count = self._prompt_count(group)
        batches = -(-count // group.requests)
        warming = -(-min(self.settings.warm_up or count, count) // group.requests)
        contenders = len(self.settings.specs) + WAYS * len(self.settings.peers)
        return (self.settings.rounds * batches + warming) * contenders

    def _load(self, model: str, dtype: str) -> tuple[Loaded | None, str]:
        """The model with its peers, or None and the reason."""
        try:
            lm = self.load(model, dtype)
        except ForetellError as error:
            if len(self.places) == 1:
                raise
            return None, reason(error)
        _describe(self.document, model, dtype, lm)  # before peers can disturb what it measures
        return Loaded(lm, *open_peers(self.settings, model, dtype, lm)), ""

    def _measure(self, group: Group, loaded: Loaded) -> list[Cell]:
        """The finished cells of a group."""
        counter = itertools.count(self.done + 1)
        context = f" {group.context}" if group.context else ""

        def step(contender: str) -> None:
            what = f"{group.model} {group.set}{context}: {contender}"
            self.tell(what, min(self.total, next(counter)), self.total)

        prompts = self.sets[group.set] if group.context is None else self.every
        alone = group.requests == 1  # peers take one request at a time
        others = loaded.others if alone else []
        bandwidth = self.document["bandwidth"]["bytes_per_s"]
        ended = _measure_group(loaded.lm, self.settings, group, prompts, others, bandwidth, step)
        return ended + (loaded.broken if alone else [])

    def _keep(self, group: Group, ended: Sequence[Cell], loaded: Loaded | None) -> None:
        """Puts the cells of a group in the place of those that it had, else at the end."""
        document = self.document
        about = group._asdict() | {"prompts": self._prompt_count(group)}
        kept: list[Cell] = []
        place = None
        for cell in document["cells"]:
            if Group.of(cell) != group:
                kept.append(cell)
            elif place is None:
                place = len(kept)
        place = len(kept) if place is None else place
        kept[place:place] = [about | cell for cell in ended]
        document["cells"] = kept
        document["peak_memory"] = max(document["peak_memory"] or 0, peak_memory() or 0) or None
        if loaded is not None:
            _note_memory_limit(document, loaded.lm, ended)
        self.save(document)


def _failed(name: str, why: str) -> Cell:
    return {"contender": name, "about": "", "baseline": None, "status": "failed", "reason": why}


def open_peers(
    settings: Settings, model: str, dtype: str, lm: LM
) -> tuple[list[PeerContender], list[Cell]]:
    """The peers that are ready, and a failed cell for each that is not."""
    draft = settings.draft
    if draft is None and model == "demo":
        draft = "demo-draft"
    if draft in EMBEDDED:
        draft = str(ASSETS / draft)
    target = lm.models["target"]
    place = Place(
        model=str(lm.path or model),
        draft=draft,
        dtype=dtype if dtype == "int8" else numbers(target),  # `auto` is what was stored
        device=str(target.device),
        threads=torch.get_num_threads(),
        eos=lm.engine.eos,
    )
    ready: list[PeerContender] = []
    broken: list[Cell] = []
    for name in settings.peers:
        try:
            ready += [PeerContender(peer) for peer in peers.contenders(name, place)]
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
        forget_peak()  # what that took has nothing to do with decoding
    costs = lm.measure()
    seconds = {}
    for rows, curve in costs["seconds"].items():
        seconds[str(rows)] = {str(tokens): value for tokens, value in curve.items()}
    described = {
        "model": model,
        "dtype": dtype,
        "computed_in": numbers(target),
        "about": costs["about"],
        "seconds": seconds,
        "weight_bytes": weight_bytes(target),
        "draft_weight_bytes": weight_bytes(lm.models.get("draft")),
    }
    others = [m for m in document["models"] if (m["model"], m["dtype"]) != (model, dtype)]
    document["models"] = [*others, described]


def _note_memory_limit(document: dict[str, Any], lm: LM, ended: Sequence[Cell]) -> None:
    """Notes how much memory should be enough for the largest of all: its weights with SPARE, its
    caches, and PROGRAM.
    """
    weights = sum(held_bytes(model) for model in lm.models.values())
    caches = max((cell.get("cache_bytes") or 0 for cell in ended), default=0)
    if old := document.get("memory_limit"):
        weights = max(weights, old["weights"])
        caches = max(caches, old["caches"])
    document["memory_limit"] = {
        "weights": weights,
        "caches": caches,
        "bytes": int(SPARE * weights) + caches + PROGRAM,
    }


def _measure_group(
    lm: LM,
    settings: Settings,
    group: Group,
    prompts: Sequence[Prompt],
    others: Sequence[PeerContender],
    bandwidth: float,
    tell: Callable[[str], None],
) -> list[Cell]:
    """The finished cells of one group; the first contender is what the others are measured
    against.
    """
    try:
        if group.context is None:
            texts = [prompt_ids(lm, prompt) for prompt in prompts]
        else:
            texts = cut(lm, prompts, group.context, settings.max_new_tokens)
    except ForetellError as error:
        names = [*(other.name for other in others), *settings.specs]
        return [_failed(name, reason(error)) for name in names]
    contenders: list[Contender] = [*others]
    broken: list[Cell] = []
    for spec in settings.specs:
        try:
            contenders.append(Method(lm, spec))
        except ForetellError as error:
            broken.append(_failed(spec, reason(error)))
    batches = _batches(texts, group.requests)
    tallies = interleave(contenders, batches, settings, group.temperature, tell)
    reads = {name: weight_bytes(model) for name, model in lm.models.items()}
    if group.requests > 1:  # a shared forward is counted by everybody in it
        reads = dict.fromkeys(reads)
    ended = cells(contenders, tallies, reads, bandwidth)
    for cell, tally in zip(ended, tallies, strict=True):
        if cell.get("identical"):
            cell["identical"] |= _difference(lm.models["target"], batches, tally)
    return ended + broken


def _batches(texts: Sequence[list[int]], requests: int) -> list[list[list[int]]]:
    """Batches of `requests` texts; a set smaller than a batch fills it by beginning again."""
    batches = []
    for start in range(0, len(texts), requests):
        batches.append([texts[(start + k) % len(texts)] for k in range(requests)])
    return batches


def _difference(model: Model, batches: Sequence[list[list[int]]], tally: Tally) -> dict[str, Any]:
    """Where the first difference is, and how far apart the target's two best logits are there."""
    if tally.first is None:
        return {}
    number, position, plain = tally.first
    margin = None
    if len(batches[number]) == 1:
        row = model.score([*batches[number][0], *plain[:position]])[0]
        best, second = row.topk(2).values.tolist()
        margin = best - second
    return {"batch": number, "position": position, "margin": margin}
