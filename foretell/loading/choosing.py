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


def whole_adapter(
    build: Callable[[], Decoder], hf_model: PreTrainedModel, model_name: str, requested: str
) -> tuple[Decoder | None, Refusals]:
    """A model's adapter that an executor computes all by itself, None where none takes it; and who
    refused it.
    """
    refusals: Refusals = ()
    for executor_name, runtime in registry.whole_runtimes(
        hf_model, hf_model.device.type, requested
    ):
        runtime.prepare_model(hf_model)
        model = build()
        try:
            model.use(runtime.make_executor)
        except LookupError as error:
            refusals += note_refusal(model_name, executor_name, error, requested)
        else:
            return model, refusals
    return None, refusals


def hand_over(model: Decoder, executor: str) -> Refusals:
    """Lets executors compute its steps, each the next one's fallback.

    Where they do not take it torch does, and the reasons are returned. Raises Unsupported where the
    one that the user named does not take it.
    """
    refusals: Refusals = ()
    for executor_name, runtime in registry.candidate_runtimes(
        model.hf, model.device.type, executor
    ):
        try:
            model.use(partial(runtime.make_executor, fallback=model.executor))
        except LookupError as error:
            refusals += note_refusal(model.name, executor_name, error, executor)
    if model.executor is not None and model.executor.fallback is not None:
        model.executor.fallback.release()  # of what only the probe asked it for
    return refusals


def note_refusal(model_name: str, executor: str, error: LookupError, requested: str) -> Refusals:
    """Notes that an executor does not take a model. Raises Unsupported where it is `requested`."""
    if executor == requested:
        need = f"what it takes ({error})"
        cure = "use another executor, or leave it out"
        raise Unsupported.missing_capability(
            f"executor={executor!r}", model_name, need, cure
        ) from error
    return ((executor, str(error)),)
