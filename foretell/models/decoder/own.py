"""Families that transformers does not know, whose modules are here.

A family is named by the `model_type` of its config.json. Its file has two functions:

    model_class(raw)   the class whose `from_pretrained` loads a folder with these settings;
                       raises BadModel for settings that it does not compute
    make_adapter(hf, name, exact_bits, dtype, backend)
                       the Decoder of such a model for the options of `load`, or None: the usual
                       one; raises Unsupported for options that ask for another way
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import Unsupported
from foretell.models.decoder.packed import WHOLE_NUMBERS

if TYPE_CHECKING:
    from foretell.models.decoder.decoder import Decoder

FILES = {"pldrllm": "pldr", "blockffn": "blockffn"}  # by model_type, of this folder


def class_of_own(raw_settings: Mapping[str, Any]) -> Any:
    """The class that loads a model with these settings, of a config.json; None: it is no family
    of ours. Raises BadModel.
    """
    family_module = _family_module(raw_settings.get("model_type"))
    return None if family_module is None else family_module.model_class(raw_settings)


def own_adapter(
    hf_model: Any,
    model_name: str,
    exact_bits: bool = False,
    dtype: str = "auto",
    backend: str = "auto",
) -> Decoder | None:
    """The adapter of a model of ours that needs one of its own. Raises Unsupported."""
    family_module = _family_module(hf_model.config.model_type)
    if family_module is None:
        return None
    own_decoder: Decoder | None = family_module.make_adapter(
        hf_model, model_name, exact_bits, dtype, backend
    )
    return own_decoder


def check_torch_alone(
    model_name: str, exact_bits: bool, dtype: str, backend: str, need: str, cure: str
) -> None:
    """Raises Unsupported for options of `load` that ask for another way to compute a model than by
    torch, in the number formats that it has.
    """
    refused_options = {
        "exact_bits=True": exact_bits,
        f"dtype={dtype!r}": dtype in WHOLE_NUMBERS,
        f"backend={backend!r}": backend not in ("auto", "torch"),
    }
    for option, is_refused in refused_options.items():
        if is_refused:
            raise Unsupported.missing_capability(option, model_name, need, cure)


def _family_module(model_type: Any) -> Any:
    file_name = FILES.get(model_type) if isinstance(model_type, str) else None
    return None if file_name is None else importlib.import_module(f"{__package__}.{file_name}")
