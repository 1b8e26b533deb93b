"""Phi 3 and 4, whose queries, keys and values are one matrix, and so are gate and up."""

from __future__ import annotations

from foretell.models.gguf.architecture import Architecture
from foretell.models.gguf.architectures.llama import NORMS, TOP

ARCHITECTURES = {
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
