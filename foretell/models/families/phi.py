"""Phi: layer norms with biases, both halves beside each other, a part of each head turned, no gate.
Phi 3 and 4: llama whose queries, keys and values are one matrix, gate and up another.
"""

from __future__ import annotations

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("phi", "phi3")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    if config.model_type == "phi3":
        return LayerDescription(
            qkv="self_attn.qkv_proj",
            gate="",
            up="",
            gate_up="mlp.gate_up_proj",
            activation=config.activation(),
        )
    if config.qk_layernorm:
        raise LookupError("its heads have norms of their own, which are not described")
    return LayerDescription(
        norm="layer",
        before_mlp="input_layernorm",
        out="self_attn.dense",
        gate="",
        up="mlp.fc1",
        down="mlp.fc2",
        activation=config.activation(),
        parallel=True,
    )
