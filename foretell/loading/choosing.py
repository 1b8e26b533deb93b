"""Which executors compute a loaded model's steps: those that take it, and why others do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from foretell.errors import Unsupported
from foretell.models import executors as registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretell.models.decoder.decoder import Decoder

Refusals = tuple[tuple[str, str], ...]  # (executor, why it does not take a model)


def whole_by(
    build: Callable[[], Decoder], hf: PreTrainedModel, name: str, wanted: str
) -> tuple[Decoder | None, Refusals]:
    """A model's adapter that an executor computes all by itself, None where none takes it; and who
    refused it.
    """
    refusals: Refusals = ()
    for executor, runtime in registry.whole(hf, hf.device.type, wanted):
        runtime.prepare(hf)
        model = build()
        try:
            model.use(runtime.make)
        except LookupError as error:
            refusals += refused(name, executor, error, wanted)
        else:
            return model, refusals
    return None, refusals


def hand_over(model: Decoder, executor: str) -> Refusals:
    """Lets executors compute its steps, each the next one's fallback.

    Where they do not take it torch does, and the reasons are returned. Raises Unsupported where the
    one that the user named does not take it.
    """
    refusals: Refusals = ()
    for name, runtime in registry.candidates(model.hf, model.device.type, executor):
        try:
            model.use(partial(runtime.make, fallback=model.executor))
        except LookupError as error:
            refusals += refused(model.name, name, error, executor)
    if model.executor is not None and model.executor.fallback is not None:
        model.executor.fallback.release()  # of what only the probe asked it for
    return refusals


def refused(model: str, executor: str, error: LookupError, wanted: str) -> Refusals:
    """Notes that an executor does not take a model. Raises Unsupported where it is `wanted`."""
    if executor == wanted:
        need = f"what it takes ({error})"
        cure = "use another executor, or leave it out"
        raise Unsupported.missing(f"executor={executor!r}", model, need, cure) from error
    return ((executor, str(error)),)
