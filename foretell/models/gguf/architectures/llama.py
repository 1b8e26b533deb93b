"""Llama, Qwen 2 and Qwen 3: norms before each half of a layer, and a gate."""

from __future__ import annotations

from foretell.models.gguf.architecture import (
    Architecture,
    Source,
    halves_in_turn,
)

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GATED = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
# The file's rotation takes neighbours for a pair, transformers' takes halves.
IN_TURN = {
    "self_attn.q_proj": Source(("attn_q",), halves_in_turn("num_attention_heads")),
    "self_attn.k_proj": Source(("attn_k",), halves_in_turn("num_key_value_heads")),
}

ARCHITECTURES = {
    "llama": Architecture("llama", GATED | IN_TURN | NORMS, TOP, biases=BIASES, zero_biases=True),
    "qwen2": Architecture("qwen2", GATED | NORMS, TOP, zero_biases=True),
    "qwen3": Architecture(
        "qwen3", GATED | NORMS | HEAD_NORMS, TOP, biases=BIASES, zero_biases=True
    ),
}
