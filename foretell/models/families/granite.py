"""Granite: llama with multipliers of scores and of what each half adds (those of embeddings and
logits are the loop's).
"""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import ConfigFields, LayerDescription, describe_llama

MODEL_TYPES = ("granite", "granite_swa")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    return replace(
        describe_llama(config, layer),
        scale=config.attention_multiplier,
        residual=config.residual_multiplier,
    )
