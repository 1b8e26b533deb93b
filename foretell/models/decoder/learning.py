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
from foretell.errors import RequestFailed, Unsupported, first_message_line
from foretell.models.decoder.derived import Derived
from foretell.models.decoder.fused import fused_blocks
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
    """A learner of one tenant's weights."""

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
        """Returns itself, which learns already."""
        return self

    def begin(self, request: Request, weights: Model | None) -> None:
        """Caches that are made for this request from now on belong to these weights."""
        if weights is not None:
            self.begun[id(request)] = weights
            weakref.finalize(request, self.begun.pop, id(request), None)

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = LearntCache(self.layout, self.dtype, self.device)
        cache.weights = self.begun.get(id(request))
        return self.prepare_cache(cache, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Computes jobs by each request's weights, those of the same weights in one forward."""
        groups: dict[Model | None, list[int]] = {}
        for job_index, job in enumerate(jobs):
            weights = job.cache.weights if isinstance(job.cache, LearntCache) else None
            groups.setdefault(weights, []).append(job_index)
        logits: dict[int, torch.Tensor] = {}
        job_states: dict[int, dict[int, torch.Tensor]] = {}
        total_width = 0
        for weights, job_indices in groups.items():
            group_jobs = [jobs[job_index] for job_index in job_indices]
            group_result = (
                weights.compute(group_jobs, taps) if weights else super().compute(group_jobs, taps)
            )
            if len(groups) == 1:
                return group_result
            total_width += group_result.width
            row_logits = group_result.logits.split([len(job.rows) for job in group_jobs])
            logits |= dict(zip(job_indices, row_logits, strict=True))
            node_counts = [len(job.tokens) for job in group_jobs]
            for position, job_index in enumerate(job_indices):
                split_states = {
                    tap: tap_states.split(node_counts)
                    for tap, tap_states in group_result.hidden.items()
                }
                job_states[job_index] = {
                    tap: split[position] for tap, split in split_states.items()
                }
        job_order = range(len(jobs))
        tap_states = {
            tap: torch.cat([job_states[job_index][tap] for job_index in job_order]) for tap in taps
        }
        return Computed(
            torch.cat([logits[job_index] for job_index in job_order]),
            tap_states,
            "torch",
            total_width,
        )

    def learner(self, update_interval: int, rate: float | None = None) -> Learner:
        """Makes a tenant's learner, with weights of its own. `rate`: of its steps; None: RATE."""
        return Learner(update_interval, self.scholar(self, rate).learn)


def learning_decoder(
    base: Any, decoder_class: type[Any], row_tokens: torch.Tensor | None = None
) -> Learning:
    """The decoder `base` as a model that learns.

    `decoder_class`: its class, which is made anew of weights that were learnt; `row_tokens`: the
    tokens that its rows are of, None: all. Raises Unsupported for a model that cannot be trained.
    """
    weight_dtypes = {parameter.dtype for parameter in base.hf.parameters()}
    if (
        type(base) is not decoder_class
        or base.narrow
        or not all(weight_dtype.is_floating_point for weight_dtype in weight_dtypes)
    ):
        raise cannot_learn(base.name)
    return Learning(base, lambda model, rate: Student(model, decoder_class, rate, row_tokens))


class Student:
    """A copy of a decoder that learns, and the optimiser of its weights."""

    def __init__(
        self,
        model: Learning,
        decoder_class: type[Any],
        rate: float | None,
        row_tokens: torch.Tensor | None,
    ):
        self.model = model
        self.kind = decoder_class
        self.rate = RATE if rate is None else rate
        self.kept = None if row_tokens is None else row_tokens.cpu()
        self.hf: Any = None  # copied when it first learns
        self.optimiser: torch.optim.Optimizer | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Student:
        student_copy = Student(self.model, self.kind, self.rate, self.kept)
        student_copy.hf, student_copy.optimiser = copy.deepcopy((self.hf, self.optimiser), memo)
        return student_copy

    def learn(self, lessons: Sequence[Lesson]) -> Model:
        """Makes one step on these lessons; returns the weights. Raises RequestFailed, which names
        the model.
        """
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._learn_step(lessons)
        except Exception as error:
            raise RequestFailed(
                f"online: {self.model.name} could not learn from {len(lessons)} responses "
                f"({first_message_line(error)}); it keeps its weights; set online=0 to leave it "
                "as it is"
            ) from error

    def _learn_step(self, lessons: Sequence[Lesson]) -> Model:
        if self.hf is None:
            self.hf = copy_modules(self.model.base)
        if self.optimiser is None:
            self.optimiser = torch.optim.AdamW(self.hf.parameters(), self.rate, weight_decay=DECAY)
        self.optimiser.zero_grad()
        token_count = sum(lesson.size for lesson in lessons)
        for lesson in lessons:
            token_ids = torch.tensor([lesson.ids], device=self.model.device)
            logits = self.hf(input_ids=token_ids, use_cache=False).logits[0].cpu()
            loss = Lesson.loss(clone_tensors(lesson), logits, self.kept) / token_count
            if not bool(loss.isfinite()):
                raise ValueError("its loss is not a finite number")
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.optimiser.zero_grad()
        frozen_model = copy.deepcopy(self.hf).to(self.model.dtype).requires_grad_(False)
        base = self.model.base
        learnt_model: Model = self.kind(
            frozen_model, self.model.name, fused_blocks if base.fused else None
        )
        return learnt_model


@one_at_a_time
def copy_modules(base: Any) -> Any:
    """A decoder's modules in float32, copied while no forward has them set otherwise."""
    with torch.inference_mode(False):
        hf_model = copy.deepcopy(base.hf)
        for module_name, module in list(hf_model.named_modules()):
            if isinstance(module, PackedLinear):  # the C library's, no gradient passes
                hf_model.set_submodule(module_name, module.plain())
        return hf_model.float().eval().requires_grad_(True)


def clone_tensors(lesson: Lesson) -> Lesson:
    """Copies a lesson's tensors: they may come from a step without gradients, whose tensors no
    gradient may keep.
    """
    tokens, chances = lesson.tokens.clone(), lesson.chances.clone()
    return replace(lesson, tokens=tokens, chances=chances)


def cannot_learn(model_name: str) -> Unsupported:
    return Unsupported.missing_capability(
        "online",
        model_name,
        "a draft model whose weights torch can train",
        "load one in float32 or bfloat16 by transformers, or set online=0",
    )
