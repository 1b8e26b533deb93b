"""GLM 4: norms before and after both halves, gate and up in one matrix, and half of a head turned,
neighbours together. GLM (the first with that name in transformers) has no norms after the halves.
"""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("glm", "glm4")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    description = LayerDescription(
        gate="",
        up="",
        gate_up="mlp.gate_up_proj",
        activation=config.activation(),
        rotation="interleaved",
    )
    if config.model_type == "glm":
        return description
    return replace(
        description,
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
    )
