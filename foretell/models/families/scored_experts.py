"""Mixtures in which a bias takes part in the choice of experts and not in their weights: GLM 4.5,
dots 1, Solar Open and MiniMax M2 score each expert by itself (the logistic function), ERNIE 4.5 by
the softmax of all.

All but MiniMax M2 add experts that every token shares; GLM, dots and Solar choose among the experts
of the best groups. The first layers of some have no experts.
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

MODEL_TYPES = ("glm4_moe", "dots1", "solar_open", "minimax_m2", "ernie4_5_moe")
HEAD_NORMS: dict[str, Any] = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
SHARED: dict[str, Any] = {
    part: f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
NONE: dict[str, Any] = {"gate": "", "up": "", "down": ""}
SMALL = 1e-6  # sums of weights that renormalised ones are never near


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    config.note("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    config.note("moe_intermediate_size", "num_mtp_layers")  # the modules have them, or lack them
    kind = config.model_type
    description = describe_llama(config, layer)
    if kind == "ernie4_5_moe":
        return _describe_ernie(config, layer, replace(description, rotation="interleaved"))
    if kind == "minimax_m2":
        experts = ExpertsDescription(
            count=config.num_local_experts,
            chosen=config.num_experts_per_tok,
            scoring="logistic",
            renormalized=True,
            choice_bias="mlp.e_score_correction_bias",
            activation=config.activation(),
        )
        return replace(description, whole_heads=True, experts=experts, **HEAD_NORMS, **NONE)
    if kind == "dots1" or config.use_qk_norm:
        description = replace(description, **HEAD_NORMS)
    experts = _describe_grouped(config)
    has_experts = kind == "solar_open" or layer >= config.first_k_dense_replace
    return replace(description, experts=experts, **SHARED) if has_experts else description


def _describe_grouped(config: ConfigFields) -> ExpertsDescription:
    config.note("n_shared_experts")  # one matrix holds all of them
    return ExpertsDescription(
        count=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        scoring="logistic",
        renormalized=bool(config.norm_topk_prob),
        scaling=config.routed_scaling_factor,
        groups=config.n_group,
        chosen_groups=config.topk_group,
        group_best=2,
        choice_bias="mlp.gate.e_score_correction_bias",
        activation=config.activation(),
    )


def _describe_ernie(
    config: ConfigFields, layer: int, description: LayerDescription
) -> LayerDescription:
    if config.moe_norm_min > SMALL:
        raise LookupError("the weights of its experts are not divided by sums that are small")
    last_layer = config.moe_layer_end_index
    is_due = (layer + 1) % config.moe_layer_interval == 0
    is_within = config.moe_layer_start_index <= layer <= last_layer
    shared = SHARED if config.moe_num_shared_experts else NONE
    experts = ExpertsDescription(
        count=config.moe_num_experts,
        chosen=config.moe_k,
        renormalized=True,
        choice_bias="mlp.gate.moe_statics.e_score_correction_bias",
        activation=config.activation(),
    )
    return replace(description, experts=experts, **shared) if is_due and is_within else description
