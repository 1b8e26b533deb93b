"""Gemma 1 to 3: norms with weights 1 + w, after both halves since the second, and a GELU gate.

Gemma 2 caps scores and logits; Gemma 3 norms heads, and its layers with windows turn by a rotation
of their own. Embeddings are multiplied by the root of their width (measured by the loop).
"""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("gemma", "gemma2", "gemma3_text")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    config.note("use_bidirectional_attention")  # the layout's probe refuses such masks
    if config.model_type == "gemma":
        activation = config.activation("hidden_act")
        return LayerDescription(norm_offset=1.0, activation=activation)
    description = LayerDescription(
        norm_offset=1.0,
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        activation=config.activation("hidden_activation"),
        scale=config.query_pre_attn_scalar**-0.5,
    )
    score_cap = config.attn_logit_softcapping or 0.0
    if config.model_type == "gemma2":
        return replace(description, score_cap=score_cap)
    # Gemma 3's class has the field of the cap too, and never reads it.
    return replace(description, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
