"""gpt-oss: sinks in the softmax of scores, windows by turns, biases everywhere, and experts with
clamped gates.
"""

from __future__ import annotations

from foretell.models.families.description import (
    ConfigFields,
    ExpertsDescription,
    LayerDescription,
)

MODEL_TYPES = ("gpt_oss",)
CLAMP = (1.702, 7.0)  # of the gate, as the C library computes it


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    config.note("output_router_logits", "router_aux_loss_coef", "hidden_act")
    if (config.swiglu_alpha, config.swiglu_limit) != CLAMP:
        raise LookupError("its experts' gates are clamped at other numbers than gpt-oss's")
    experts = ExpertsDescription(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        scoring="softmax_of_chosen",
        router="mlp.router",
        transposed=True,
        activation="clamped_silu",
    )
    return LayerDescription(
        gate="", up="", down="", experts=experts, sinks="self_attn.sinks", angles_once=True
    )
