"""Gemma 1, 2 and 3: norms of 1 + w, which files hold as they are multiplied, and embeddings times
the root of their width, of which no key tells.
"""

from __future__ import annotations

from typing import Any

from foretell.models.gguf.architecture import (
    PATTERN,
    Architecture,
    Source,
    shifted,
    window_types,
)
from foretell.models.gguf.architectures.llama import ATTENTION, MLP, TOP
from foretell.models.gguf.header import Header

# Layers of the models of 27 B, whose scores are scaled by what a head has of the width and not by
# its own width, of which no key tells either.
LARGE = {"gemma2": 46, "gemma3": 62}
LOCAL_BASE = 10000.0  # of the rotation in Gemma 3's windows
SHIFTED_TOP = TOP | {"model.norm": shifted("output_norm")}
NORMS_AROUND: dict[str, str | Source] = {
    "input_layernorm": shifted("attn_norm"),
    "post_attention_layernorm": shifted("post_attention_norm"),
    "pre_feedforward_layernorm": shifted("ffn_norm"),
    "post_feedforward_layernorm": shifted("post_ffw_norm"),
}


def complete_gemma2(header: Header, values: dict[str, Any]) -> None:
    """Caps that a file leaves unsaid are those of all its models; windows come by turns."""
    values["attn_logit_softcapping"] = header.get("attn_logit_softcapping", 50.0)
    values["final_logit_softcapping"] = header.get("final_logit_softcapping", 30.0)
    values["query_pre_attn_scalar"] = _query_scale(header, values)
    values["layer_types"] = window_types(header, 2)


def complete_gemma3(header: Header, values: dict[str, Any]) -> None:
    """One layer of six turns by the file's rotation and sees everything; the others see a window
    and turn by a base of their own.
    """
    values["query_pre_attn_scalar"] = _query_scale(header, values)
    values["layer_types"] = window_types(header, 6)
    local_base = float(header.get("rope.freq_base_swa", LOCAL_BASE))
    values["rope_parameters"] = {
        "full_attention": values["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
    }


def _query_scale(header: Header, values: dict[str, Any]) -> int:
    if header.get("block_count") == LARGE[header.architecture]:
        return int(values["hidden_size"] // values["num_attention_heads"])
    return int(values["head_dim"])


ARCHITECTURES = {
    "gemma": Architecture(
        "gemma",
        ATTENTION
        | MLP
        | {
            "input_layernorm": shifted("attn_norm"),
            "post_attention_layernorm": shifted("ffn_norm"),
        },
        SHIFTED_TOP,
    ),
    "gemma2": Architecture(
        "gemma2",
        ATTENTION | MLP | NORMS_AROUND,
        SHIFTED_TOP,
        keys=frozenset({PATTERN}),
        complete=complete_gemma2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        ATTENTION
        | MLP
        | NORMS_AROUND
        | {
            "self_attn.q_norm": shifted("attn_q_norm"),
            "self_attn.k_norm": shifted("attn_k_norm"),
        },
        SHIFTED_TOP,
        keys=frozenset({PATTERN, "rope.freq_base_swa"}),
        complete=complete_gemma3,
    ),
}
