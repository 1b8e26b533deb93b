"""SmolLM 3: llama, but the heads of each fourth layer are not turned."""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import ConfigFields, LayerDescription, describe_llama

MODEL_TYPES = ("smollm3",)


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    turns = config.no_rope_layers[layer]
    return replace(describe_llama(config, layer), rotation="halves" if turns else "")
