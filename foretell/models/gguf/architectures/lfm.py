"""LFM 2: gated short convolutions, with attention in some layers."""

from __future__ import annotations

from typing import Any

import torch

from foretell.models.gguf.architecture import RMS, Architecture, Source
from foretell.models.gguf.header import Header

REQUIRED_LFM = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "shortconv.l_cache",
    RMS,
)


def complete_lfm2(header: Header, values: dict[str, Any]) -> None:
    """Layers without key heads are convolutions. Raises LookupError."""
    head_counts = header.get("attention.head_count_kv")
    layer_count = header.require_value("block_count")
    if not isinstance(head_counts, list):
        head_counts = [head_counts] * layer_count
    kinds = set(head_counts) - {0}
    if len(head_counts) != layer_count or len(kinds) != 1:
        raise LookupError(
            f"its header has {header.architecture}.attention.head_count_kv={head_counts}, which is "
            "not computed here"
        )
    values["num_key_value_heads"] = kinds.pop()
    values["layer_types"] = ["full_attention" if count else "conv" for count in head_counts]
    values["block_auto_adjust_ff_dim"] = False  # what the file says is adjusted
    values["conv_bias"] = "blk.0.shortconv.conv.bias" in header.tensors


LFM_LAYER: dict[str, str | Source] = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": "shortconv.conv.weight",
    "conv.in_proj": "shortconv.in_proj.weight",
    "conv.out_proj": "shortconv.out_proj.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
LFM_TOP: dict[str, str | Source] = {
    "model.embed_tokens": "token_embd",
    # The norm after the last layer, whatever files call it.
    "model.embedding_norm": Source(("token_embd_norm",), alternative=Source(("output_norm",))),
    "lm_head": "output",
}
ARCHITECTURES = {
    "lfm2": Architecture(
        "lfm2",
        LFM_LAYER,
        LFM_TOP,
        keys=frozenset({"attention.head_count_kv"}),
        required=REQUIRED_LFM,
        rest=torch.float32,
        complete=complete_lfm2,
    ),
}
