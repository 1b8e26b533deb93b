"""Families whose norms stand after the halves of a layer, or beside one norm for both: OLMo,
EXAONE 4, GLM 4 and Command R.
"""

from __future__ import annotations

from typing import Any

from foretell.models.gguf.architecture import (
    LAYER_NORM,
    PATTERN,
    REQUIRED,
    Architecture,
    Source,
    window_types,
)
from foretell.models.gguf.architectures.llama import (
    ATTENTION,
    BIASES,
    HEAD_NORMS,
    IN_TURN,
    MLP,
    QKV,
    TOP,
)
from foretell.models.gguf.header import Header

NORMS_AFTER: dict[str, str | Source] = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OLMO_EPSILON = 1e-5  # of OLMo 1's norms, in transformers a constant
ONE_NORM: dict[str, str | Source] = {"input_layernorm": "attn_norm"}


def complete_olmo(header: Header, values: dict[str, Any]) -> None:
    """A limit of 0 is none. Raises LookupError for another epsilon than the family's."""
    values["clip_qkv"] = header.get("attention.clamp_kqv") or None
    epsilon = header.get(LAYER_NORM)
    if epsilon is not None and abs(epsilon - OLMO_EPSILON) > 1e-9:
        raise LookupError(
            f"its header has olmo.{LAYER_NORM}={epsilon}, and what computes it {OLMO_EPSILON}"
        )


def complete_olmo3(header: Header, values: dict[str, Any]) -> None:
    """Three layers of four see a window; they turn by the same base, which nothing scales there."""
    values["layer_types"] = window_types(header, 4)
    whole_rotation = values["rope_parameters"]
    values["rope_parameters"] = {
        "full_attention": whole_rotation,
        "sliding_attention": {"rope_type": "default", "rope_theta": whole_rotation["rope_theta"]},
    }


def complete_windows(header: Header, values: dict[str, Any]) -> None:
    """Three layers of four see a window, where there is one."""
    values["layer_types"] = window_types(header, 4)


def complete_command_r(header: Header, values: dict[str, Any]) -> None:
    """Norms on queries and keys are told by their tensors alone."""
    values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors


ARCHITECTURES = {
    "olmo": Architecture(
        "olmo",
        ATTENTION | IN_TURN | MLP,
        TOP,
        keys=frozenset({LAYER_NORM, "attention.clamp_kqv"}),
        required=REQUIRED,
        complete=complete_olmo,
    ),
    "olmo2": Architecture(
        "olmo2",
        ATTENTION | MLP | HEAD_NORMS | NORMS_AFTER,
        TOP,
        instead={
            ("attention.sliding_window", None): Architecture(
                "olmo3",
                ATTENTION | MLP | HEAD_NORMS | NORMS_AFTER,
                TOP,
                keys=frozenset({PATTERN}),
                complete=complete_olmo3,
            )
        },
    ),
    "exaone4": Architecture(
        "exaone4",
        ATTENTION | MLP | HEAD_NORMS | NORMS_AFTER,
        TOP,
        keys=frozenset({PATTERN}),
        complete=complete_windows,
    ),
    "glm4": Architecture(
        "glm4",
        ATTENTION
        | {
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "input_layernorm": "attn_norm",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        TOP,
        biases={"attention_bias": QKV},
        partial_rotation=True,
    ),
    "command-r": Architecture(
        "cohere",
        ATTENTION | MLP | ONE_NORM | HEAD_NORMS,
        TOP,
        required=(*REQUIRED, LAYER_NORM),
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_command_r,
    ),
    "cohere2": Architecture(
        "cohere2",
        ATTENTION | MLP | ONE_NORM,
        TOP,
        keys=frozenset({PATTERN}),
        required=(*REQUIRED, LAYER_NORM),
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_windows,
    ),
}
