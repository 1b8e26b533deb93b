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

from foretell.errors import BadModel
from foretell.families.masked import Masked, is_masked
from foretell.families.own import class_of_own
from foretell.families.projected import projected
from foretell.ops.head_merging import FIELD

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


def check_keys(name: str, report: Mapping[str, Any]) -> None:
    """Raises BadModel where weights are missing, which transformers makes up at random, or unknown,
    which it leaves out; both with no more than a warning.
    """
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
