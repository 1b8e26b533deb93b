"""Families with a mixture of experts, whose matrices a file has in one tensor of each kind."""

from __future__ import annotations

from typing import Any

from foretell.models.gguf.architecture import Architecture, Source, window_types
from foretell.models.gguf.architectures.llama import (
    ATTENTION,
    BIASES,
    EXPERTS,
    GATE_UP,
    HEAD_NORMS,
    IN_TURN,
    NORMS,
    QKV,
    REQUIRED_EXPERTS,
    TOP,
    complete_granite,
)
from foretell.models.gguf.header import Header

SHARED_EXPERT: dict[str, str | Source] = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GRANITE_EXPERTS: dict[str, str | Source] = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": GATE_UP,
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
}


def complete_qwen2_moe(header: Header, values: dict[str, Any]) -> None:
    """The chosen experts' parts stay as they are among all, unless the file says otherwise."""
    values.setdefault("norm_topk_prob", False)
    values["decoder_sparse_step"] = 1


def complete_olmoe(header: Header, values: dict[str, Any]) -> None:
    """The chosen experts' parts stay as they are among all, unless the file says otherwise."""
    values.setdefault("norm_topk_prob", False)


def complete_qwen3_moe(header: Header, values: dict[str, Any]) -> None:
    """The chosen experts' parts are made to add up to one, unless the file says otherwise."""
    values.setdefault("norm_topk_prob", True)
    values["decoder_sparse_step"] = 1


def complete_gpt_oss(header: Header, values: dict[str, Any]) -> None:
    """Windows come by turns, and the ramp of yarn is not rounded to whole pairs."""
    values["layer_types"] = window_types(header, 2)
    if values["rope_parameters"]["rope_type"] == "yarn":
        values["rope_parameters"]["truncate"] = False


ARCHITECTURES = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        ATTENTION | NORMS | EXPERTS | SHARED_EXPERT,
        TOP,
        required=(
            *REQUIRED_EXPERTS,
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
        ),
        biases={"qkv_bias": QKV},
        complete=complete_qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        ATTENTION | NORMS | HEAD_NORMS | EXPERTS,
        TOP,
        required=(*REQUIRED_EXPERTS, "expert_feed_forward_length"),
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_qwen3_moe,
    ),
    "olmoe": Architecture(
        "olmoe",
        ATTENTION | NORMS | HEAD_NORMS | EXPERTS,
        TOP,
        required=REQUIRED_EXPERTS,
        complete=complete_olmoe,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        ATTENTION | IN_TURN | NORMS | GRANITE_EXPERTS,
        TOP,
        fields={"logit_scale": "logits_scaling"},
        required=REQUIRED_EXPERTS,
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_granite,
        instead={
            ("expert_shared_feed_forward_length", None): Architecture(
                "granitemoeshared",
                ATTENTION
                | IN_TURN
                | NORMS
                | GRANITE_EXPERTS
                | {
                    "shared_mlp.input_linear": Source(("ffn_gate_shexp", "ffn_up_shexp")),
                    "shared_mlp.output_linear": "ffn_down_shexp",
                },
                TOP,
                fields={
                    "logit_scale": "logits_scaling",
                    "expert_shared_feed_forward_length": "shared_intermediate_size",
                },
                required=REQUIRED_EXPERTS,
                biases={"attention_bias": BIASES["attention_bias"]},
                complete=complete_granite,
            )
        },
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        ATTENTION
        | {
            "self_attn.sinks": "attn_sinks",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": Source(
                ("post_attention_norm",), alternative=Source(("ffn_norm",))
            ),
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": Source(
                ("ffn_gate_exps", "ffn_up_exps"), interleaved=True, turned=True
            ),
            "mlp.experts.gate_up_proj_bias": Source(
                ("ffn_gate_exps.bias", "ffn_up_exps.bias"), interleaved=True
            ),
            "mlp.experts.down_proj": Source(("ffn_down_exps",), turned=True),
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        TOP,
        fields={"expert_feed_forward_length": "intermediate_size"},
        required=REQUIRED_EXPERTS,
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_gpt_oss,
    ),
}
