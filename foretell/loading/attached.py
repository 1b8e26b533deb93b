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
from foretell.models.decoder.fused import blocks
from foretell.models.recurrent.recurrent import decoder_of

NAME = "_foretell_adapter"


class _Kept:
    """An adapter with what it was made of. Copies of the model, in memory or in files, begin
    without.
    """

    def __init__(self, adapter: Decoder, made_of: Any):
        self.adapter = adapter
        self.made_of = made_of

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return (dict, ())


def attached(hf: PreTrainedModel, name: str) -> Decoder:
    """Its adapter. One call at a time may be under way for a model. Raises Unsupported."""
    made_of = _build(hf)
    kept = hf.__dict__.get(NAME)
    if not isinstance(kept, _Kept) or kept.made_of != made_of:
        hf.__dict__.pop(NAME, None)
        adapter = decoder_of(hf, name, blocks)
        kept = hf.__dict__[NAME] = _Kept(adapter, _build(hf))  # whose parts may lie elsewhere now
    return kept.adapter


def _build(hf: PreTrainedModel) -> Any:
    """What an adapter depends on beside the numbers of the weights."""
    modules = [
        (id(m), len(m._forward_hooks), len(m._forward_pre_hooks), id(m.__dict__.get("forward")))
        for m in hf.modules()
    ]
    tensors = [(p.data_ptr(), p.dtype, p.shape) for p in (*hf.parameters(), *hf.buffers())]
    return modules, tensors, hf.config.to_json_string()
