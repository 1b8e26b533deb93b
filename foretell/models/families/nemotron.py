"""Nemotron: layer norms with weights 1 + w, a part of each head turned, a squared ReLU and no gate.
Arcee's AFM has llama's norms and the same second half, Jais 2 layer norms with weights w.
"""

from __future__ import annotations

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("nemotron", "arcee", "jais2")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    if config.model_type == "arcee":
        return LayerDescription(gate="", activation=config.activation())
    offset = 1.0 if config.model_type == "nemotron" else 0.0
    activation = config.activation()
    return LayerDescription(norm="layer", norm_offset=offset, gate="", activation=activation)
