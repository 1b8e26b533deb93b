"""OLMo 2 and 3: norms after both halves only, and of all heads at once."""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import ConfigFields, LayerDescription, describe_llama

MODEL_TYPES = ("olmo2", "olmo3")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    return replace(
        describe_llama(config, layer),
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        whole_heads=True,
    )
