"""Granite: llama with multipliers of scores and of what each half adds (those of embeddings and
logits are the loop's). With windows (granite_swa) it has sinks, and some layers turn no heads.
"""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import ConfigFields, LayerDescription, describe_llama

MODEL_TYPES = ("granite", "granite_swa")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    description = replace(
        describe_llama(config, layer),
        scale=config.attention_multiplier,
        residual=config.residual_multiplier,
    )
    if config.model_type == "granite":
        return description
    # The loop finds out whether those that turn have the base of all.
    turns = config.layer_rope_theta[layer] != 0
    return replace(description, rotation="halves" if turns else "", sinks="self_attn.sinks")
