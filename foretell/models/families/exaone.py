"""EXAONE 4: norms after both halves and of heads; where some layers have windows, the heads of the
others are not turned.
"""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import ConfigFields, LayerDescription, describe_llama

MODEL_TYPES = ("exaone4",)


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    config.note("sliding_window_pattern")  # layer_types say the same
    turns = config.sliding_window is None or config.kind_of(layer) == "sliding_attention"
    return replace(
        describe_llama(config, layer),
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        rotation="halves" if turns else "",
    )
