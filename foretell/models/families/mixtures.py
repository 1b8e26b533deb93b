"""Mixtures of experts built on llama's layers: Mixtral, Qwen 2 and 3, OLMoE, Granite.

They differ in how experts are weighed: of the softmax of all scores (renormalised or not), or of
those chosen; Qwen 2 adds an expert that all tokens share, as far as a gate of its own lets it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretell.models.families.description import (
    ConfigFields,
    ExpertsDescription,
    LayerDescription,
    describe_llama,
)

MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
HEAD_NORMS: dict[str, Any] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
SHARED: dict[str, Any] = {
    f"{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
}


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    description = describe_llama(config, layer)
    config.note("router_jitter_noise", "output_router_logits", "router_aux_loss_coef")
    config.note("moe_intermediate_size", "shared_expert_intermediate_size")  # the modules have them
    kind = config.model_type
    if config.clip_qkv is not None:
        raise LookupError("its queries, keys and values are clipped, which is not described")
    if kind in ("qwen3_moe", "olmoe"):
        description = replace(description, whole_heads=kind == "olmoe", **HEAD_NORMS)
    if kind == "granitemoe":
        description = replace(
            description, scale=config.attention_multiplier, residual=config.residual_multiplier
        )
    if kind in ("qwen2_moe", "qwen3_moe") and not _is_sparse(config, layer):
        return description
    shared: dict[str, Any] = SHARED if kind == "qwen2_moe" else {"gate": "", "up": "", "down": ""}
    return replace(description, experts=_describe_experts(config, kind), **shared)


def _is_sparse(config: ConfigFields, layer: int) -> bool:
    """Whether a layer of Qwen's has experts."""
    is_listed = layer in (config.mlp_only_layers or ())
    is_due = (layer + 1) % config.decoder_sparse_step == 0
    return config.num_experts > 0 and is_due and not is_listed


def _describe_experts(config: ConfigFields, kind: str) -> ExpertsDescription:
    count = config.num_local_experts if kind in ("mixtral", "granitemoe") else config.num_experts
    experts = ExpertsDescription(
        count=count, chosen=config.num_experts_per_tok, activation=config.activation()
    )
    if kind == "granitemoe":
        paths: dict[str, Any] = {"block": "block_sparse_moe", "router": "block_sparse_moe.router"}
        experts = replace(experts, experts="block_sparse_moe.experts", **paths)
        return replace(experts, scoring="softmax_of_chosen")
    if kind == "mixtral":
        return replace(experts, renormalized=True)
    share = "mlp.shared_expert_gate" if kind == "qwen2_moe" else ""
    return replace(experts, renormalized=bool(config.norm_topk_prob), share=share)
