"""Llama and the families that differ from it by little: RMS norms before each half of a layer,
heads that turn whole, and mostly a gate.
"""

from __future__ import annotations

from typing import Any

from foretell.models.gguf.architecture import (
    REQUIRED,
    RMS,
    Architecture,
    Source,
    Sources,
    halves_in_turn,
)
from foretell.models.gguf.header import Header

TOP: dict[str, str | Source] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
ATTENTION: dict[str, str | Source] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
MLP: dict[str, str | Source] = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS: dict[str, str | Source] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEAD_NORMS: dict[str, str | Source] = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
# The file's rotation takes neighbours for a pair, transformers' takes halves.
IN_TURN: dict[str, str | Source] = {
    "self_attn.q_proj": Source(("attn_q",), halves_in_turn("num_attention_heads")),
    "self_attn.k_proj": Source(("attn_k",), halves_in_turn("num_key_value_heads")),
}
GATE_UP = Source(("ffn_gate_up_exps",), alternative=Source(("ffn_gate_exps", "ffn_up_exps")))
EXPERTS: dict[str, str | Source] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": GATE_UP,
    "mlp.experts.down_proj": "ffn_down_exps",
}
REQUIRED_EXPERTS = (*REQUIRED, RMS, "expert_count", "expert_used_count")
QKV = ("attn_q", "attn_k", "attn_v")
BIASES = {
    "attention_bias": (*QKV, "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
LAYER: Sources = ATTENTION | MLP | NORMS
TURNED_LAYER: Sources = ATTENTION | MLP | NORMS | IN_TURN


def complete_granite(header: Header, values: dict[str, Any]) -> None:
    """Scores are scaled by a number of the file, or as everywhere."""
    head_width = values["hidden_size"] // values["num_attention_heads"]
    values.setdefault("attention_multiplier", values.get("head_dim", head_width) ** -0.5)
    values.setdefault("logits_scaling", 1.0)


def complete_smollm3(header: Header, values: dict[str, Any]) -> None:
    """Each fourth layer does not turn its heads, which no key says."""
    values["no_rope_layer_interval"] = 4
    values["use_sliding_window"] = False


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        TURNED_LAYER,
        TOP,
        biases=BIASES,
        zero_biases=True,
        instead={
            ("expert_count", None): Architecture(
                "mixtral", ATTENTION | IN_TURN | NORMS | EXPERTS, TOP, required=REQUIRED_EXPERTS
            )
        },
    ),
    "qwen2": Architecture("qwen2", LAYER, TOP, zero_biases=True),
    "qwen3": Architecture(
        "qwen3",
        ATTENTION | MLP | NORMS | HEAD_NORMS,
        TOP,
        biases={"attention_bias": BIASES["attention_bias"]},
        zero_biases=True,
    ),
    "granite": Architecture(
        "granite",
        TURNED_LAYER,
        TOP,
        fields={"logit_scale": "logits_scaling"},
        biases=BIASES,
        complete=complete_granite,
    ),
    "smollm3": Architecture("smollm3", TURNED_LAYER, TOP, biases=BIASES, complete=complete_smollm3),
    "arcee": Architecture("arcee", TURNED_LAYER, TOP, biases=BIASES),
    "seed_oss": Architecture(
        "seed_oss",
        ATTENTION | MLP | NORMS | {"post_attention_layernorm": "post_attention_norm"},
        TOP,
        biases={
            "attention_bias": QKV,
            "attention_out_bias": ("attn_output",),
            "mlp_bias": BIASES["mlp_bias"],
        },
    ),
    # Its heads turn by neighbours in transformers too.
    "ernie4_5": Architecture(
        "ernie4_5", LAYER, TOP, biases={"use_bias": (*QKV, "attn_output", *BIASES["mlp_bias"])}
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        ATTENTION
        | MLP
        | NORMS
        | {
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
        },
        TOP,
        biases={"attention_bias": BIASES["attention_bias"]},
    ),
}
