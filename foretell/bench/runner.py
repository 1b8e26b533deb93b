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
from foretell.bench.figures import Tally, group_cells
from foretell.bench.hardware import (
    forget_peak,
    held_bytes,
    measure_bandwidth,
    peak_memory,
    weight_bytes,
)
from foretell.bench.peers import Place
from foretell.bench.prompts import Prompt
from foretell.bench.sets import LONG, MIXED, cut_prompts, prompt_ids
from foretell.bench.settings import Settings
from foretell.bench.turns import interleave, one_line_reason
from foretell.core.model import Model
from foretell.engine.cost_profile import number_format
from foretell.errors import ForetellError
from foretell.loading.fetch import fetch_shipped
from foretell.loading.names import EMBEDDED

WAYS = 3  # in which a peer decodes, at most
SPARE = 1.15  # times the weights, and
PROGRAM = 300_000_000  # bytes for the program itself: memory that should be enough
Cell = dict[str, Any]
Sets = Mapping[str, Sequence[Prompt]]  # prompts by name of the set
Load = Callable[[str, str], LM]  # (model, dtype)
Tell = Callable[[str, int, int], None]  # (what is being measured, runs done, runs in all)


class Group(NamedTuple):
    """Fields that the cells of a group share, named as in a document."""

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


def _ignore_progress(what: str, done: int, total: int) -> None:
    pass


def run_bench(
    settings: Settings,
    sets: Sets,
    load: Load,
    document: dict[str, Any],
    tell: Tell = _ignore_progress,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin_document`) with the groups it lacks, and returns it.

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
        groups = [group for place in self.places for group in self._groups_of(*place)]
        self.done = 0
        self.total = sum(map(self._count_runs, groups))

    def run(self) -> None:
        # A group with a failed cell is run again as a whole: its ratios are of one run.
        known_cells = self.document["cells"]
        failed_groups = {Group.of(cell) for cell in known_cells if cell["status"] == "failed"}
        finished_groups = {Group.of(cell) for cell in known_cells} - failed_groups
        for model, dtype in self.places:
            loaded: Loaded | None = None
            load_failure = ""
            for group in self._groups_of(model, dtype):
                if group not in finished_groups:
                    if loaded is None and not load_failure:
                        loaded, load_failure = self._load_model(model, dtype)
                    if loaded is None:
                        group_cells = [
                            _failed_cell(spec, load_failure) for spec in self.settings.specs
                        ]
                    else:
                        group_cells = self._measure_cells(group, loaded)
                    self._store_cells(group, group_cells, loaded)
                self.done += self._count_runs(group)
                self.tell(f"{model} {group.set}", self.done, self.total)

    def _groups_of(self, model: str, dtype: str) -> list[Group]:
        settings = self.settings
        set_choices = itertools.product(self.sets, settings.temperatures, settings.requests)
        groups = [
            Group(model, dtype, set_name, temperature, request_count, None)
            for set_name, temperature, request_count in set_choices
        ]
        request_count = settings.requests[0]
        for temperature, context in itertools.product(settings.temperatures, settings.contexts):
            groups.append(Group(model, dtype, MIXED, temperature, request_count, context))
        return groups

    def _prompt_count(self, group: Group) -> int:
        if group.context is None:
            return len(self.sets[group.set])
        return min(LONG, len(self.every))

    def _count_runs(self, group: Group) -> int:
        """Counts the runs that a group takes, the warm-up's too."""
        prompt_count = self._prompt_count(group)
        batch_count = -(-prompt_count // group.requests)
        warm_up_batches = -(
            -min(self.settings.warm_up or prompt_count, prompt_count) // group.requests
        )
        contender_count = len(self.settings.specs) + WAYS * len(self.settings.peers)
        return (self.settings.rounds * batch_count + warm_up_batches) * contender_count

    def _load_model(self, model: str, dtype: str) -> tuple[Loaded | None, str]:
        """The model with its peers, or None and the reason."""
        try:
            lm = self.load(model, dtype)
        except ForetellError as error:
            if len(self.places) == 1:
                raise
            return None, one_line_reason(error)
        _describe_model(
            self.document, model, dtype, lm
        )  # before peers can disturb what it measures
        return Loaded(lm, *open_peers(self.settings, model, dtype, lm)), ""

    def _measure_cells(self, group: Group, loaded: Loaded) -> list[Cell]:
        """The finished cells of a group."""
        run_counter = itertools.count(self.done + 1)
        context = f" {group.context}" if group.context else ""

        def step(contender_name: str) -> None:
            progress_text = f"{group.model} {group.set}{context}: {contender_name}"
            self.tell(progress_text, min(self.total, next(run_counter)), self.total)

        prompts = self.sets[group.set] if group.context is None else self.every
        single_request = group.requests == 1  # peers take one request at a time
        peer_contenders = loaded.others if single_request else []
        bandwidth = self.document["bandwidth"]["bytes_per_s"]
        group_cells = _measure_group(
            loaded.lm, self.settings, group, prompts, peer_contenders, bandwidth, step
        )
        return group_cells + (loaded.broken if single_request else [])

    def _store_cells(
        self, group: Group, group_cells: Sequence[Cell], loaded: Loaded | None
    ) -> None:
        """Puts the cells of a group in the place of those that it had, else at the end."""
        document = self.document
        group_fields = group._asdict() | {"prompts": self._prompt_count(group)}
        document_cells: list[Cell] = []
        position = None
        for cell in document["cells"]:
            if Group.of(cell) != group:
                document_cells.append(cell)
            elif position is None:
                position = len(document_cells)
        position = len(document_cells) if position is None else position
        document_cells[position:position] = [group_fields | cell for cell in group_cells]
        document["cells"] = document_cells
        document["peak_memory"] = max(document["peak_memory"] or 0, peak_memory() or 0) or None
        if loaded is not None:
            _note_memory_limit(document, loaded.lm, group_cells)
        self.save(document)


def _failed_cell(name: str, failure_reason: str) -> Cell:
    return {
        "contender": name,
        "about": "",
        "baseline": None,
        "status": "failed",
        "reason": failure_reason,
    }


def open_peers(
    settings: Settings, model: str, dtype: str, lm: LM
) -> tuple[list[PeerContender], list[Cell]]:
    """The peers that are ready, and a failed cell for each that is not."""
    draft_name = settings.draft
    if draft_name is None and model == "demo":
        draft_name = "demo-draft"
    if draft_name in EMBEDDED:
        draft_name = str(fetch_shipped(draft_name))
    target = lm.models["target"]
    place = Place(
        model=str(lm.path or model),
        draft=draft_name,
        dtype=dtype if dtype == "int8" else number_format(target),  # `auto` is what was stored
        device=str(target.device),
        threads=torch.get_num_threads(),
        eos=lm.engine.eos,
    )
    ready_peers: list[PeerContender] = []
    failed_cells: list[Cell] = []
    for name in settings.peers:
        try:
            ready_peers += [PeerContender(peer) for peer in peers.contenders(name, place)]
        except Exception as error:  # another library may raise anything
            failed_cells.append(_failed_cell(name, one_line_reason(error)))
    return ready_peers, failed_cells


def _describe_model(document: dict[str, Any], model: str, dtype: str, lm: LM) -> None:
    """Notes the model's cost curve and size, and once the memory's speed."""
    target = lm.models["target"]
    if document["bandwidth"] is None:
        document["bandwidth"] = {
            "bytes_per_s": measure_bandwidth(target.device),
            "device": str(target.device),
        }
        forget_peak()  # what that took has nothing to do with decoding
    costs = lm.measure()
    seconds_by_rows = {}
    for row_count, seconds_by_tokens in costs["seconds"].items():
        seconds_by_rows[str(row_count)] = {
            str(tokens): forward_seconds for tokens, forward_seconds in seconds_by_tokens.items()
        }
    description = {
        "model": model,
        "dtype": dtype,
        "computed_in": number_format(target),
        "about": costs["about"],
        "seconds": seconds_by_rows,
        "weight_bytes": weight_bytes(target),
        "draft_weight_bytes": weight_bytes(lm.models.get("draft")),
    }
    other_models = [
        model_entry
        for model_entry in document["models"]
        if (model_entry["model"], model_entry["dtype"]) != (model, dtype)
    ]
    document["models"] = [*other_models, description]


def _note_memory_limit(document: dict[str, Any], lm: LM, group_cells: Sequence[Cell]) -> None:
    """Notes how much memory should be enough for the largest of all: its weights with SPARE, its
    caches, and PROGRAM.
    """
    weight_size = sum(held_bytes(model) for model in lm.models.values())
    cache_size = max((cell.get("cache_bytes") or 0 for cell in group_cells), default=0)
    if earlier_limit := document.get("memory_limit"):
        weight_size = max(weight_size, earlier_limit["weights"])
        cache_size = max(cache_size, earlier_limit["caches"])
    document["memory_limit"] = {
        "weights": weight_size,
        "caches": cache_size,
        "bytes": int(SPARE * weight_size) + cache_size + PROGRAM,
    }


def _measure_group(
    lm: LM,
    settings: Settings,
    group: Group,
    prompts: Sequence[Prompt],
    peer_contenders: Sequence[PeerContender],
    bandwidth: float,
    tell: Callable[[str], None],
) -> list[Cell]:
    """The finished cells of one group; the first contender is what the others are measured
    against.
    """
    try:
        if group.context is None:
            prompt_texts = [prompt_ids(lm, prompt) for prompt in prompts]
        else:
            prompt_texts = cut_prompts(lm, prompts, group.context, settings.max_new_tokens)
    except ForetellError as error:
        contender_names = [*(peer.name for peer in peer_contenders), *settings.specs]
        return [_failed_cell(name, one_line_reason(error)) for name in contender_names]
    contenders: list[Contender] = [*peer_contenders]
    failed_cells: list[Cell] = []
    for spec in settings.specs:
        try:
            contenders.append(Method(lm, spec))
        except ForetellError as error:
            failed_cells.append(_failed_cell(spec, one_line_reason(error)))
    batches = _make_batches(prompt_texts, group.requests)
    tallies = interleave(contenders, batches, settings, group.temperature, tell)
    bytes_per_forward = {name: weight_bytes(model) for name, model in lm.models.items()}
    if group.requests > 1:  # a shared forward is counted by everybody in it
        bytes_per_forward = dict.fromkeys(bytes_per_forward)
    finished_cells = group_cells(contenders, tallies, bytes_per_forward, bandwidth)
    for cell, tally in zip(finished_cells, tallies, strict=True):
        if cell.get("identical"):
            cell["identical"] |= _describe_difference(lm.models["target"], batches, tally)
    return finished_cells + failed_cells


def _make_batches(texts: Sequence[list[int]], requests: int) -> list[list[list[int]]]:
    """Batches of `requests` texts; a set smaller than a batch fills it by beginning again."""
    batches = []
    for batch_start in range(0, len(texts), requests):
        batches.append([texts[(batch_start + offset) % len(texts)] for offset in range(requests)])
    return batches


def _describe_difference(
    model: Model, batches: Sequence[list[list[int]]], tally: Tally
) -> dict[str, Any]:
    """Describes where the first difference is, with the margin of the target's two best logits."""
    if tally.first is None:
        return {}
    batch_number, position, plain_tokens = tally.first
    margin = None
    if len(batches[batch_number]) == 1:
        logits = model.score([*batches[batch_number][0], *plain_tokens[:position]])[0]
        best_logit, second_logit = logits.topk(2).values.tolist()
        margin = best_logit - second_logit
    return {"batch": batch_number, "position": position, "margin": margin}
