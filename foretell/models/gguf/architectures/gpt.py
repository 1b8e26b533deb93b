"""Families with layer norms, without a gate, or with parts of heads that do not turn: GPT, Phi,
StarCoder, StableLM and Nemotron.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.models.gguf.architecture import (
    LAYER_NORM,
    REQUIRED,
    Architecture,
    Order,
    Source,
    shifted,
)
from foretell.models.gguf.architectures.llama import ATTENTION, BIASES, MLP, NORMS, QKV, TOP
from foretell.models.gguf.header import Header

WITH_NORM = (*REQUIRED, LAYER_NORM)


def third_of_rows(part: int) -> Order:
    """Queries, keys or values of one matrix, where there are as many of each."""

    def order_rows(config: Any, row_count: int) -> np.ndarray:
        return np.arange(row_count).reshape(3, -1)[part]

    return order_rows


def heads_in_turn(config: Any, row_count: int) -> np.ndarray:
    """A head's queries, keys and values beside each other, which the file has apart."""
    rows = np.arange(row_count).reshape(3, config.num_attention_heads, -1)
    return rows.swapaxes(0, 1).reshape(-1)


def complete_stablelm(header: Header, values: dict[str, Any]) -> None:
    """Norms on queries and keys are told by their tensors alone."""
    values["qk_layernorm"] = "blk.0.attn_q_norm.weight" in header.tensors


def _part_of_qkv(name: str, part: int) -> Source:
    return Source((name,), alternative=Source(("attn_qkv",), third_of_rows(part)))


ARCHITECTURES = {
    "gpt2": Architecture(
        "gpt2",
        {
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        {
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        layers="transformer.h",
        required=WITH_NORM,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "attention.query_key_value": Source(("attn_qkv",), heads_in_turn),
            "attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        {
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "lm_head": "output",
        },
        layers="gpt_neox.layers",
        required=WITH_NORM,
        biases={"attention_bias": ("attn_qkv", "attn_output")},
        partial_rotation=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        ATTENTION | NORMS | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        TOP,
        required=WITH_NORM,
        biases={"use_bias": (*QKV, "attn_output", "ffn_up", "ffn_down")},
    ),
    "stablelm": Architecture(
        "stablelm",
        ATTENTION
        | MLP
        | NORMS
        | {
            "self_attn.q_layernorm.norms.*": "attn_q_norm",
            "self_attn.k_layernorm.norms.*": "attn_k_norm",
        },
        TOP,
        required=WITH_NORM,
        biases={"use_qkv_bias": QKV},
        partial_rotation=True,
        complete=complete_stablelm,
    ),
    "nemotron": Architecture(
        "nemotron",
        ATTENTION
        | MLP
        | {
            "input_layernorm.weight": shifted("attn_norm.weight"),
            "input_layernorm.bias": "attn_norm.bias",
            "post_attention_layernorm.weight": shifted("ffn_norm.weight"),
            "post_attention_layernorm.bias": "ffn_norm.bias",
        },
        TOP
        | {
            "model.norm.weight": shifted("output_norm.weight"),
            "model.norm.bias": "output_norm.bias",
        },
        fields={LAYER_NORM: "norm_eps"},
        required=WITH_NORM,
        biases=BIASES,
        partial_rotation=True,
    ),
    "phi2": Architecture(
        "phi",
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": _part_of_qkv("attn_q", 0),
            "self_attn.k_proj": _part_of_qkv("attn_k", 1),
            "self_attn.v_proj": _part_of_qkv("attn_v", 2),
            "self_attn.dense": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
        TOP | {"model.final_layernorm": "output_norm"},
        required=WITH_NORM,
        partial_rotation=True,
    ),
    "phi3": Architecture(
        "phi3",
        NORMS
        | {
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        TOP,
        partial_rotation=True,
    ),
}
