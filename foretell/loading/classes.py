"""Which of transformers' classes a model's files are loaded with, and whether they all belong
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import logging

from foretell.errors import BadModel
from foretell.models.decoder.head_merging import FIELD
from foretell.models.decoder.own import class_of_own
from foretell.models.decoder.projected import projected_class
from foretell.models.diffusion.masked import Masked, is_masked
from foretell.models.weights import MERGE, PACKED, UNPACKED

OF_CONFIG = ("revision", "trust_remote_code")  # arguments that a configuration is found by


def class_of(location: str | Path, arguments: dict[str, Any]) -> Any:
    """The class whose `from_pretrained(location, **arguments)` is to be called; `arguments` may
    lose some. Raises what that does.
    """
    raw_settings, _ = PreTrainedConfig.get_config_dict(location, revision=arguments.get("revision"))
    if is_masked(raw_settings):
        return Masked(raw_settings)
    own_class = class_of_own(raw_settings)
    if own_class is not None:
        arguments.pop("trust_remote_code", None)
        return own_class
    config_arguments = {
        argument: arguments[argument] for argument in OF_CONFIG if argument in arguments
    }
    config = AutoConfig.from_pretrained(location, **config_arguments)
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_text and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if is_text and getattr(config, FIELD, None) is not None:
        return projected_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return AutoModelForCausalLM


def is_plain(folder: Path) -> bool:
    """Whether a folder holds a language model that transformers alone describes, in numbers that no
    other library has packed. Raises what `class_of` does.
    """
    if class_of(folder, {}) is not AutoModelForCausalLM:
        return False
    config = AutoConfig.from_pretrained(folder)
    return getattr(config, "quantization_config", None) is None


def build_empty(folder: Path, dtype: torch.dtype) -> Any:
    """The model of such a folder without its numbers."""
    from accelerate import init_empty_weights

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        hf_model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if (folder / "generation_config.json").is_file():
        hf_model.generation_config = GenerationConfig.from_pretrained(folder)
    return hf_model


def read_model(location: str | Path, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Reads the model, and transformers' report of its weights; no bars. Raises nearly all."""
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model_class = class_of(location, arguments)
        hf_model, report = model_class.from_pretrained(
            location, output_loading_info=True, **arguments
        )
        return hf_model, report
    finally:
        if had_bars:
            logging.enable_progress_bar()


def check_whole(model_name: str, hf_model: Any, report: Mapping[str, Any]) -> None:
    """Raises BadModel where weights are missing, which transformers makes up at random, or unknown,
    which it leaves out, both with no more than a warning, or where it has added LoRA weights.
    """
    if getattr(hf_model, "_hf_peft_config_loaded", False):
        raise BadModel(f"{model_name}: holds weights that are added to a model's; {MERGE}")
    if any(key.endswith(PACKED) for key in report["unexpected_keys"]):
        raise BadModel(f"{model_name}: its weights are packed by another library; {UNPACKED}")
    for report_key, meaning in (
        ("missing_keys", "lack"),
        ("unexpected_keys", "have, and its configuration does not,"),
    ):
        weight_names = sorted(report[report_key])
        if weight_names:
            more_text = f" and {len(weight_names) - 3} more" if len(weight_names) > 3 else ""
            raise BadModel(
                f"{model_name}: the weights {meaning} {', '.join(weight_names[:3])}{more_text}; "
                "config.json and the .safetensors files do not belong together"
            )
