"""Llama, and what is built as it is: RMS norms before both halves, a gate, heads turned by halves.

Norms of heads (Qwen 3) and biases (Qwen 2) are where the modules have them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretell.models.families.description import ConfigFields, LayerDescription, describe_llama

MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "helium", "ernie4_5")
HEAD_NORMS: dict[str, Any] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    description = describe_llama(config, layer)
    if config.model_type == "qwen3":
        return replace(description, **HEAD_NORMS)
    if config.model_type in ("helium", "ernie4_5"):
        return replace(description, rotation="interleaved")
    return description
