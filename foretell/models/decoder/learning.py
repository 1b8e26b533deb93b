"""A draft model that learns while it serves: each request keeps the weights it began with.

The base's weights are never written. Weights that were learnt are decoders of their own, of a copy
of its modules, and never change once they are made; a cache belongs to those of its request.
Learning goes on in a further copy, in float32.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed, Model
from foretell.errors import RequestFailed, Unsupported, first_line
from foretell.models.decoder.derived import Derived
from foretell.models.decoder.fused import blocks
from foretell.models.decoder.packed import PackedLinear
from foretell.models.online import Learner, Lesson
from foretell.ops.threads import one_at_a_time

if TYPE_CHECKING:
    from foretell.core.request import Request

RATE = 1e-4  # of AdamW, unless a method has its own
DECAY = 0.01  # of weights, an update's, times the rate


class LearntCache(Cache):
    """Rows that these weights made."""

    weights: Model | None = None  # None: the base's


class Scholar(Protocol):
    """What learns for a tenant."""

    def learn(self, lessons: Sequence[Lesson]) -> Model:
        """New weights, made of the last ones and these lessons."""


class Learning(Derived):
    """The model `base`, with the weights that a request was told to begin with.

    `scholar(model, rate)`: a new one for a tenant, who learns from this model's weights at a rate
    (None: its own).
    """

    learns = True

    def __init__(self, base: Any, scholar: Callable[[Learning, float | None], Scholar]):
        super().__init__(base, "online")
        self.scholar = scholar
        self.begun: dict[int, Model] = {}  # by the request's id

    def learning(self) -> Learning:
        """It learns already."""
        return self

    def begin(self, request: Request, weights: Model | None) -> None:
        """Caches that are made for this request from now on belong to these weights."""
        if weights is not None:
            self.begun[id(request)] = weights
            weakref.finalize(request, self.begun.pop, id(request), None)

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = LearntCache(self.layout, self.dtype, self.device)
        cache.weights = self.begun.get(id(request))
        return self.prepared(cache, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """By each request's weights, those of the same weights in one forward."""
        groups: dict[Model | None, list[int]] = {}
        for number, job in enumerate(jobs):
            weights = job.cache.weights if isinstance(job.cache, LearntCache) else None
            groups.setdefault(weights, []).append(number)
        logits: dict[int, torch.Tensor] = {}
        hidden: dict[int, dict[int, torch.Tensor]] = {}
        width = 0
        for weights, numbers in groups.items():
            own = [jobs[number] for number in numbers]
            found = weights.compute(own, taps) if weights else super().compute(own, taps)
            if len(groups) == 1:
                return found
            width += found.width
            rows = found.logits.split([len(job.rows) for job in own])
            logits |= dict(zip(numbers, rows, strict=True))
            sizes = [len(job.tokens) for job in own]
            for place, number in enumerate(numbers):
                parts = {tap: states.split(sizes) for tap, states in found.hidden.items()}
                hidden[number] = {tap: split[place] for tap, split in parts.items()}
        order = range(len(jobs))
        states = {tap: torch.cat([hidden[number][tap] for number in order]) for tap in taps}
        return Computed(torch.cat([logits[number] for number in order]), states, "torch", width)

    def learner(self, every: int, rate: float | None = None) -> Learner:
        """A tenant's, with weights of its own. `rate`: of its steps; None: RATE."""
        return Learner(every, self.scholar(self, rate).learn)


def learning_decoder(base: Any, kind: type[Any], kept: torch.Tensor | None = None) -> Learning:
    """The decoder `base` as a model that learns.

    `kind`: its class, which is made anew of weights that were learnt; `kept`: the tokens that its
    rows are of, None: all. Raises Unsupported for a model that cannot be trained.
    """
    kinds = {p.dtype for p in base.hf.parameters()}
    if type(base) is not kind or base.narrow or not all(k.is_floating_point for k in kinds):
        raise cannot_learn(base.name)
    return Learning(base, lambda model, rate: Student(model, kind, rate, kept))


class Student:
    """A copy of a decoder that learns, and the optimiser of its weights."""

    def __init__(
        self, model: Learning, kind: type[Any], rate: float | None, kept: torch.Tensor | None
    ):
        self.model = model
        self.kind = kind
        self.rate = RATE if rate is None else rate
        self.kept = None if kept is None else kept.cpu()
        self.hf: Any = None  # copied when it first learns
        self.optimiser: torch.optim.Optimizer | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Student:
        twin = Student(self.model, self.kind, self.rate, self.kept)
        twin.hf, twin.optimiser = copy.deepcopy((self.hf, self.optimiser), memo)
        return twin

    def learn(self, lessons: Sequence[Lesson]) -> Model:
        """One step on these; returns the weights. Raises RequestFailed, which names the model."""
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._learn(lessons)
        except Exception as error:
            raise RequestFailed(
                f"online: {self.model.name} could not learn from {len(lessons)} responses "
                f"({first_line(error)}); it keeps its weights; set online=0 to leave it as it is"
            ) from error

    def _learn(self, lessons: Sequence[Lesson]) -> Model:
        if self.hf is None:
            self.hf = copied(self.model.base)
        if self.optimiser is None:
            self.optimiser = torch.optim.AdamW(self.hf.parameters(), self.rate, weight_decay=DECAY)
        self.optimiser.zero_grad()
        size = sum(lesson.size for lesson in lessons)
        for lesson in lessons:
            ids = torch.tensor([lesson.ids], device=self.model.device)
            logits = self.hf(input_ids=ids, use_cache=False).logits[0].cpu()
            loss = Lesson.loss(usable(lesson), logits, self.kept) / size
            if not bool(loss.isfinite()):
                raise ValueError("its loss is not a finite number")
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.optimiser.zero_grad()
        frozen = copy.deepcopy(self.hf).to(self.model.dtype).requires_grad_(False)
        base = self.model.base
        learnt: Model = self.kind(frozen, self.model.name, blocks if base.fused else None)
        return learnt


@one_at_a_time
def copied(base: Any) -> Any:
    """A decoder's modules in float32, copied while no forward has them set otherwise."""
    with torch.inference_mode(False):
        hf = copy.deepcopy(base.hf)
        for name, module in list(hf.named_modules()):
            if isinstance(module, PackedLinear):  # the C library's, no gradient passes
                hf.set_submodule(name, module.plain())
        return hf.float().eval().requires_grad_(True)


def usable(lesson: Lesson) -> Lesson:
    """Its tensors may come from a step without gradients, whose tensors no gradient may keep."""
    tokens, chances = lesson.tokens.clone(), lesson.chances.clone()
    return replace(lesson, tokens=tokens, chances=chances)


def cannot_learn(name: str) -> Unsupported:
    return Unsupported.missing(
        "online",
        name,
        "a draft model whose weights torch can train",
        "load one in float32 or bfloat16 by transformers, or set online=0",
    )
