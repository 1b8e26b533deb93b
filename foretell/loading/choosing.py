"""Which backends compute a loaded model's steps: those that take it, and why others do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from foretell.errors import Unsupported
from foretell.models import backend_registry as registry
from foretell.ops.threads import library_alone

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretell.models.decoder.decoder import Decoder

Refusals = tuple[tuple[str, str], ...]  # (backend, why it does not take a model)


def whole_adapter(
    build: Callable[[], Decoder], hf_model: PreTrainedModel, model_name: str, requested: str
) -> tuple[Decoder | None, Refusals]:
    """A model's adapter that a backend computes all by itself, None where none takes it; and who
    refused it.
    """
    refusals: Refusals = ()
    for backend_name, module in registry.whole_backends(hf_model, hf_model.device.type, requested):
        module.prepare_model(hf_model)
        with library_alone():
            model = build()
        try:
            with library_alone():
                model.use(module.make_backend)
        except LookupError as error:
            refusals += note_refusal(model_name, backend_name, error, requested)
        else:
            return model, refusals
    return None, refusals


def hand_over(model: Decoder, backend: str) -> Refusals:
    """Lets backends compute its steps, each the next one's fallback.

    Where they do not take it torch does, and the reasons are returned. Raises Unsupported where the
    one that the user named does not take it.
    """
    refusals: Refusals = ()
    for backend_name, module in registry.candidate_backends(model.hf, model.device.type, backend):
        try:
            model.use(partial(module.make_backend, fallback=model.backend))
        except LookupError as error:
            refusals += note_refusal(model.name, backend_name, error, backend)
    if model.backend is not None and model.backend.fallback is not None:
        model.backend.fallback.release()  # of what only the probe asked it for
    return refusals


def note_refusal(model_name: str, backend: str, error: LookupError, requested: str) -> Refusals:
    """Notes that a backend does not take a model. Raises Unsupported where it is `requested`."""
    if backend == requested:
        need = f"what it takes ({error})"
        cure = "use another backend, or leave it out"
        raise Unsupported.missing_capability(
            f"backend={backend!r}", model_name, need, cure
        ) from error
    return ((backend, str(error)),)
