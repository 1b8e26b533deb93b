"""Cohere's Command: layer norms without biases, both halves beside each other, neighbours of a head
turned together. Command R7B (cohere2) does not turn the heads of layers that see everything.
"""

from __future__ import annotations

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("cohere", "cohere2")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    turns = config.model_type == "cohere" or config.kind_of(layer) == "sliding_attention"
    if config.use_qk_norm:
        raise LookupError("its heads have norms of their own, which are not described")
    return LayerDescription(
        norm="layer",
        before_mlp="input_layernorm",
        activation=config.activation(),
        rotation="interleaved" if turns else "",
        parallel=True,
    )
