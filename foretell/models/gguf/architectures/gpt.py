"""Families with layer norms and no gate, or with parts of heads that do not turn."""

from __future__ import annotations

from foretell.models.gguf.architecture import LAYER_NORM, REQUIRED, Architecture
from foretell.models.gguf.architectures.llama import GATED, NORMS, TOP

WITH_NORM = (*REQUIRED, LAYER_NORM)
QKV = ("attn_q", "attn_k", "attn_v")

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
    "starcoder2": Architecture(
        "starcoder2",
        GATED | NORMS | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        TOP,
        required=WITH_NORM,
        biases={"use_bias": (*QKV, "attn_output", "ffn_up", "ffn_down")},
    ),
    "stablelm": Architecture(
        "stablelm",
        GATED
        | NORMS
        | {
            "self_attn.q_layernorm.norms.*": "attn_q_norm",
            "self_attn.k_layernorm.norms.*": "attn_k_norm",
        },
        TOP,
        required=WITH_NORM,
        biases={"use_qkv_bias": QKV},
        partial_rotation=True,
    ),
}
