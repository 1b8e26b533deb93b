"""Which of transformers' classes a model's files are loaded with, and whether they all belong
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.utils import logging

from foretell.errors import BadModel
from foretell.models.decoder.head_merging import FIELD
from foretell.models.decoder.own import class_of_own
from foretell.models.decoder.projected import projected
from foretell.models.diffusion.masked import Masked, is_masked
from foretell.models.weights import MERGE, PACKED, UNPACKED

OF_CONFIG = ("revision", "trust_remote_code")  # arguments that a configuration is found by


def class_of(place: str | Path, arguments: dict[str, Any]) -> Any:
    """The class to call `from_pretrained(place, **arguments)` of, whose arguments may lose some;
    raises what that does.
    """
    raw, _ = PreTrainedConfig.get_config_dict(place, revision=arguments.get("revision"))
    if is_masked(raw):
        return Masked(raw)
    own = class_of_own(raw)
    if own is not None:
        arguments.pop("trust_remote_code", None)
        return own
    chosen = {name: arguments[name] for name in OF_CONFIG if name in arguments}
    config = AutoConfig.from_pretrained(place, **chosen)
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not text and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if text and getattr(config, FIELD, None) is not None:
        return projected(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return AutoModelForCausalLM


def read(place: str | Path, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report of its weights; no bars. Raises nearly all."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        kind = class_of(place, arguments)
        hf, report = kind.from_pretrained(place, output_loading_info=True, **arguments)
        return hf, report
    finally:
        if bars:
            logging.enable_progress_bar()


def check_whole(name: str, hf: Any, report: Mapping[str, Any]) -> None:
    """Raises BadModel where weights are missing, which transformers makes up at random, or unknown,
    which it leaves out, both with no more than a warning, or where it has added LoRA weights.
    """
    if getattr(hf, "_hf_peft_config_loaded", False):
        raise BadModel(f"{name}: holds weights that are added to a model's; {MERGE}")
    if any(key.endswith(PACKED) for key in report["unexpected_keys"]):
        raise BadModel(f"{name}: its weights are packed by another library; {UNPACKED}")
    for kind, meaning in (
        ("missing_keys", "lack"),
        ("unexpected_keys", "have, and its configuration does not,"),
    ):
        keys = sorted(report[kind])
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise BadModel(
                f"{name}: the weights {meaning} {', '.join(keys[:3])}{more}; "
                "config.json and the .safetensors files do not belong together"
            )
