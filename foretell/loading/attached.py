"""The adapter of a transformers model that stays in its user's hands: made once, and made anew
where the model has been changed since.

It is kept with the model, and goes with it. Weights that are changed in place are read where they
lie; modules, parameters or hooks in others' places, another device or another number format make
another adapter.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.recurrent.recurrent import decoder_of

NAME = "_foretell_adapter"


class _Kept:
    """An adapter with what it was made of. Copies of the model, in memory or in files, begin
    without.
    """

    def __init__(self, adapter: Decoder, fingerprint: Any):
        self.adapter = adapter
        self.made_of = fingerprint

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return (dict, ())


def attached_adapter(hf_model: PreTrainedModel, model_name: str) -> Decoder:
    """The adapter of a model, kept with it. One call at a time may be under way for a model. Raises
    Unsupported.
    """
    fingerprint = _fingerprint(hf_model)
    kept_adapter = hf_model.__dict__.get(NAME)
    if not isinstance(kept_adapter, _Kept) or kept_adapter.made_of != fingerprint:
        hf_model.__dict__.pop(NAME, None)
        adapter = decoder_of(hf_model, model_name, fused_blocks)
        kept_adapter = hf_model.__dict__[NAME] = _Kept(
            adapter, _fingerprint(hf_model)
        )  # whose parts may lie elsewhere now
    return kept_adapter.adapter


def _fingerprint(hf_model: PreTrainedModel) -> Any:
    """A value that changes with all an adapter depends on beside the numbers of the weights."""
    modules = [
        (
            id(module),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            id(module.__dict__.get("forward")),
        )
        for module in hf_model.modules()
    ]
    tensors = [
        (tensor.data_ptr(), tensor.dtype, tensor.shape)
        for tensor in (*hf_model.parameters(), *hf_model.buffers())
    ]
    return modules, tensors, hf_model.config.to_json_string()
