"""GPT-NeoX (Pythia): layer norms with biases, both halves beside each other where the configuration
says so, query, key and value of a head in one piece of a matrix, a part of each head turned.
"""

from __future__ import annotations

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("gpt_neox",)


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    return LayerDescription(
        norm="layer",
        attention="attention",
        qkv="attention.query_key_value",
        qkv_by_head=True,
        out="attention.dense",
        gate="",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        activation=config.activation(),
        parallel=bool(config.use_parallel_residual),
    )
