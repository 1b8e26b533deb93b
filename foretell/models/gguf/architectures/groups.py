"""Families with experts that all tokens share beside those that are chosen, often in groups and by
scores with a bias: DeepSeek 2 and 3 with their latent attention, GLM 4 MoE, dots.llm1, ERNIE 4.5
MoE, Hunyuan MoE and LFM 2 MoE.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.models.gguf.architecture import PREDICTING, REQUIRED, RMS, Architecture, Source
from foretell.models.gguf.architectures.lfm import LFM_LAYER, LFM_TOP, complete_lfm2
from foretell.models.gguf.architectures.llama import (
    ATTENTION,
    BIASES,
    EXPERTS,
    GATE_UP,
    HEAD_NORMS,
    MLP,
    NORMS,
    QKV,
    REQUIRED_EXPERTS,
    TOP,
)
from foretell.models.gguf.header import Header

SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`
GATING = "expert_gating_func"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
SHARED: dict[str, str | Source] = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
CORRECTION: dict[str, str | Source] = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
FIELDS = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
SILENT = {
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
}
REQUIRED_GROUPS = (*REQUIRED_EXPERTS, "expert_feed_forward_length")


def join_latent(config: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """Keys (N, rank, width) and values (N, width, rank) of each head as rows of one matrix."""
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


LATENT: dict[str, str | Source] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": Source(
        ("attn_k_b", "attn_v_b"), compose=join_latent, alternative=Source(("attn_kv_b",))
    ),
    "self_attn.o_proj": "attn_output",
}
LATENT_FIELDS = FIELDS | {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
}
LATENT_KEYS = frozenset(
    (
        GATING,
        LOG_MULTIPLIER,
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_mla",
        "attention.value_length_mla",
    )
)
REQUIRED_LATENT = (
    *REQUIRED_GROUPS,
    "attention.kv_lora_rank",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
)


def complete_groups(header: Header, values: dict[str, Any]) -> None:
    """What is not said is not done. Raises LookupError for another gate than the sigmoid."""
    for name, value in SILENT.items():
        values[name] = values.get(name) or value
    _check_gating(header, SIGMOID)


def complete_latent(header: Header, values: dict[str, Any]) -> None:
    """Widths of a head's parts, which files say of the latent and of what is made of it."""
    for name, value in SILENT.items():
        values[name] = values.get(name) or value
    values.setdefault("q_lora_rank", None)
    turned_width = header.require_value("rope.dimension_count")
    key_width = header.get("attention.key_length_mla", header.get("attention.key_length"))
    values["qk_rope_head_dim"] = values["head_dim"] = turned_width
    values["qk_nope_head_dim"] = key_width - turned_width
    values["v_head_dim"] = header.get(
        "attention.value_length_mla", header.get("attention.value_length")
    )
    values["num_key_value_heads"] = values["num_attention_heads"]
    rotation = values["rope_parameters"]
    rotation.pop("partial_rotary_factor")  # that part is stated by its width
    multiplier = header.get(LOG_MULTIPLIER, 0.0)
    if multiplier and rotation["rope_type"] == "yarn":
        # Scores grow by the square of what rotations would, which stay as they are.
        rotation |= {"attention_factor": 1.0, "mscale_all_dim": 10 * multiplier}


def complete_deepseek2(header: Header, values: dict[str, Any]) -> None:
    """Experts are chosen by a softmax of all scores. Raises LookupError for weights that add up to
    one, which transformers does not compute.
    """
    complete_latent(header, values)
    _check_gating(header, SOFTMAX)
    if values["norm_topk_prob"]:
        raise LookupError(
            f"its header has {header.architecture}.expert_weights_norm=True beside a softmax, "
            "which is not computed here"
        )
    in_groups = values["n_group"] > 1
    values["topk_method"] = "group_limited_greedy" if in_groups else "greedy"


def complete_glm4_moe(header: Header, values: dict[str, Any]) -> None:
    """Norms on queries and keys are told by their tensors alone."""
    complete_groups(header, values)
    values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors


def complete_ernie(header: Header, values: dict[str, Any]) -> None:
    """Experts are chosen by a softmax. Raises LookupError for another gate."""
    _check_gating(header, SOFTMAX)
    for name, value in {"moe_num_shared_experts": 0, "moe_layer_interval": 1}.items():
        values[name] = values.get(name) or value
    values.setdefault("moe_layer_start_index", 0)
    values["moe_layer_end_index"] = header.require_value("block_count") - 1


def complete_hunyuan(header: Header, values: dict[str, Any]) -> None:
    """One expert is shared by all. Raises LookupError for another number."""
    _check_gating(header, SOFTMAX)
    shared_count = header.get("expert_shared_count", 1)
    if shared_count != 1:
        raise LookupError(
            f"its header has {header.architecture}.expert_shared_count={shared_count}, which is "
            "not computed here"
        )


def complete_lfm2_moe(header: Header, values: dict[str, Any]) -> None:
    """The weights of those chosen add up to one, and scores have a bias where a tensor says so."""
    complete_lfm2(header, values)
    _check_gating(header, SIGMOID)
    values["norm_topk_prob"] = header.get("expert_weights_norm", True)
    values.setdefault("num_dense_layers", 0)
    values["routed_scaling_factor"] = values.get("routed_scaling_factor") or 1.0
    values["use_expert_bias"] = any("exp_probs_b" in name for name in header.tensors)


def _check_gating(header: Header, computed: int) -> None:
    kind = header.get(GATING, computed) or computed
    if kind != computed:
        raise LookupError(
            f"its header has {header.architecture}.{GATING}={kind}, and what computes it {computed}"
        )


DEEPSEEK3 = Architecture(
    "deepseek_v3",
    LATENT | MLP | NORMS | EXPERTS | SHARED | CORRECTION,
    TOP,
    fields=LATENT_FIELDS,
    keys=LATENT_KEYS,
    required=REQUIRED_LATENT,
    partial_rotation=True,
    complete=complete_latent,
)

ARCHITECTURES = {
    "deepseek2": Architecture(
        "deepseek_v2",
        LATENT | MLP | NORMS | EXPERTS | SHARED,
        TOP,
        fields=LATENT_FIELDS,
        keys=LATENT_KEYS,
        required=REQUIRED_LATENT,
        partial_rotation=True,
        complete=complete_deepseek2,
        instead={(GATING, SIGMOID): DEEPSEEK3},
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        ATTENTION
        | MLP
        | EXPERTS
        | SHARED
        | CORRECTION
        | HEAD_NORMS
        | {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
        },
        TOP,
        fields=FIELDS,
        keys=frozenset({GATING, *PREDICTING}),
        required=REQUIRED_GROUPS,
        biases={"attention_bias": QKV},
        partial_rotation=True,
        complete=complete_glm4_moe,
    ),
    "dots1": Architecture(
        "dots1",
        ATTENTION | MLP | NORMS | HEAD_NORMS | EXPERTS | SHARED | CORRECTION,
        TOP,
        fields=FIELDS,
        keys=frozenset({GATING}),
        required=REQUIRED_GROUPS,
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_groups,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        ATTENTION
        | MLP
        | NORMS
        | EXPERTS
        | SHARED
        | {"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
        TOP,
        fields={
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        # The last one is written by another rule than the model's own, which tensors show.
        keys=frozenset({GATING, "expert_shared_feed_forward_length"}),
        required=REQUIRED_GROUPS,
        biases={"use_bias": (*QKV, "attn_output", *BIASES["mlp_bias"])},
        complete=complete_ernie,
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        ATTENTION
        | NORMS
        | {
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": GATE_UP,
            "mlp.experts.down_proj": "ffn_down_exps",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        TOP,
        fields={
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_feed_forward_length": "intermediate_size",
        },
        keys=frozenset({GATING, "expert_shared_count"}),
        required=REQUIRED_EXPERTS,
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_hunyuan,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        LFM_LAYER
        | {
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.experts.gate_up_proj": GATE_UP,
            "feed_forward.experts.down_proj": "ffn_down_exps",
            "feed_forward.expert_bias": "exp_probs_b.bias",
        },
        LFM_TOP,
        fields={
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "num_dense_layers",
        },
        keys=frozenset({GATING, "attention.head_count_kv"}),
        required=(*REQUIRED, RMS, "expert_count", "expert_used_count", "shortconv.l_cache"),
        rest=torch.float32,
        complete=complete_lfm2_moe,
    ),
}
