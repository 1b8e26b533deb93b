"""The models as they are served, and a float32 copy of them on the same executors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch

from foretell.api.lm import LM
from foretell.core.model import Model
from foretell.loading.wrap import wrap
from foretell.models import executors as registry
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.exact import ExactDecoder
from foretell.models.decoder.packed import widen
from foretell.models.executor import Executor


@dataclass
class Copy:
    """Models that are audited in one number format."""

    dtype: torch.dtype
    models: dict[str, Model]
    executor: str  # what computes their steps, in words


def hand_over(model: Decoder, served: Executor) -> None:
    """Gives `model` executors of the same kinds in the same order as `served` and its fallbacks.

    Raises LookupError, with the reason, where one of them refuses the model.
    """
    for name in registry.lineage(served):
        model.use(partial(registry.load(name).make, fallback=model.executor))


def executor_names(model: Model) -> str:
    """What computes a model's steps, in words: `onnxruntime, else openvino, else torch`."""
    names = []
    executor: Executor | None = getattr(model, "executor", None)
    while executor is not None:
        names.append(executor.name)
        executor = executor.fallback
    if isinstance(model, Decoder):
        names.append("torch")
    return ", else ".join(names) or model.name


def as_served(lm: LM) -> Copy:
    """The models themselves."""
    target = lm.models["target"]
    return Copy(target.dtype, lm.models, executor_names(target))


def in_float32(lm: LM) -> Copy:
    """The same models with their weights widened, which changes none of them, on the same
    executors. Where one refuses, what computes instead is said in `executor`, with the reason.

    What is no Decoder, such as a model that another runtime computes, stays as it is.
    """
    models: dict[str, Model] = {}
    for name, model in lm.models.items():
        models[name] = model
        if isinstance(model, Decoder):
            wide = copy.deepcopy(model.hf)
            widen(wide)
            # Where equal bits are an executor's, it brings them along, or refuses.
            exact = isinstance(model, ExactDecoder)
            models[name] = wrap(wide, name=model.name, exact_bits=exact).models["target"]
            models[name].tokenizer = model.tokenizer
    refusals = []
    for name, model in models.items():
        served: Executor | None = getattr(lm.models[name], "executor", None)
        if served is None or not isinstance(model, Decoder):
            continue
        try:
            hand_over(model, served)
        except LookupError as error:
            refusals.append(f"; {served.name} refuses the {name} model in float32: {error}")
    return Copy(torch.float32, models, executor_names(models["target"]) + "".join(refusals))
