"""StarCoder 2: layer norms and matrices with biases, and no gate."""

from __future__ import annotations

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("starcoder2",)


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    return LayerDescription(
        norm="layer", gate="", up="mlp.c_fc", down="mlp.c_proj", activation=config.activation()
    )
