"""The models as they are served, and a float32 copy of them on the same backends."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch

from foretell.api.lm import LM
from foretell.core.model import Model
from foretell.loading.wrap import wrap
from foretell.models import backend_registry as registry
from foretell.models.backend import Backend
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.exact import ExactDecoder
from foretell.models.decoder.packed import widen_layers


@dataclass
class Copy:
    """Models that are audited in one number format."""

    dtype: torch.dtype
    models: dict[str, Model]
    backend: str  # what computes their steps, in words


def hand_over(model: Decoder, served: Backend) -> None:
    """Gives `model` backends of the same kinds in the same order as `served` and its fallbacks.

    Raises LookupError, with the reason, where one of them refuses the model.
    """
    for name in registry.fallback_order(served):
        model.use(partial(registry.load_backend(name).make_backend, fallback=model.backend))


def backend_names(model: Model) -> str:
    """Names what computes a model's steps: `onnxruntime, else openvino, else torch`."""
    names = []
    backend: Backend | None = getattr(model, "backend", None)
    while backend is not None:
        names.append(backend.name)
        backend = backend.fallback
    if isinstance(model, Decoder):
        names.append("torch")
    return ", else ".join(names) or model.name


def served_copy(lm: LM) -> Copy:
    """Returns the models themselves."""
    target = lm.models["target"]
    return Copy(target.dtype, lm.models, backend_names(target))


def float32_copy(lm: LM) -> Copy:
    """Copies the models with their weights widened, which changes none of them, on the same
    backends. Where one refuses, `backend` says what computes instead, with the reason.

    A model that is no Decoder, such as one that another backend computes, stays as it is.
    """
    models: dict[str, Model] = {}
    for name, model in lm.models.items():
        models[name] = model
        if isinstance(model, Decoder):
            wide_model = copy.deepcopy(model.hf)
            widen_layers(wide_model)
            # Where equal bits are a backend's, it brings them along, or refuses.
            has_exact_bits = isinstance(model, ExactDecoder)
            models[name] = wrap(wide_model, name=model.name, exact_bits=has_exact_bits).models[
                "target"
            ]
            models[name].tokenizer = model.tokenizer
    refusals = []
    for name, model in models.items():
        served: Backend | None = getattr(lm.models[name], "backend", None)
        if served is None or not isinstance(model, Decoder):
            continue
        try:
            hand_over(model, served)
        except LookupError as error:
            refusals.append(f"; {served.name} refuses the {name} model in float32: {error}")
    return Copy(torch.float32, models, backend_names(models["target"]) + "".join(refusals))
