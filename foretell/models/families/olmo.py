"""OLMo 2 and 3: norms after both halves only, and of all heads at once. FlexOlmo is OLMo 2 with
experts.
"""

from __future__ import annotations

from dataclasses import replace

from foretell.models.families.description import (
    ConfigFields,
    ExpertsDescription,
    LayerDescription,
    describe_llama,
)

MODEL_TYPES = ("olmo2", "olmo3", "flex_olmo")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    description = replace(
        describe_llama(config, layer),
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        whole_heads=True,
    )
    if config.model_type != "flex_olmo":
        return description
    config.note("output_router_logits", "router_aux_loss_coef")
    experts = ExpertsDescription(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        renormalized=bool(config.norm_topk_prob),
        activation=config.activation(),
    )
    return replace(description, experts=experts, gate="", up="", down="")
