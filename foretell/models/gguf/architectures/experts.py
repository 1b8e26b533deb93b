"""Families with a mixture of experts, whose matrices a file has in one tensor for each kind."""

from __future__ import annotations

from typing import Any

from foretell.models.gguf.architecture import REQUIRED, RMS, Architecture, Source
from foretell.models.gguf.architectures.llama import (
    BIASES,
    GATED,
    HEAD_NORMS,
    NORMS,
    TOP,
)
from foretell.models.gguf.header import Header

GATE_UP = Source(("ffn_gate_up_exps",), alternative=Source(("ffn_gate_exps", "ffn_up_exps")))
ATTENTION = {path: name for path, name in GATED.items() if path.startswith("self_attn.")}
EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": GATE_UP,
    "mlp.experts.down_proj": "ffn_down_exps",
}
REQUIRED_EXPERTS = (*REQUIRED, RMS, "expert_count", "expert_used_count")


def complete_renormalised(header: Header, values: dict[str, Any]) -> None:
    """The chosen experts' parts are made to add up to one, unless the file says otherwise."""
    values.setdefault("norm_topk_prob", True)
    values["decoder_sparse_step"] = 1


ARCHITECTURES = {
    "qwen3moe": Architecture(
        "qwen3_moe",
        ATTENTION | NORMS | HEAD_NORMS | EXPERTS,
        TOP,
        required=(*REQUIRED_EXPERTS, "expert_feed_forward_length"),
        biases={"attention_bias": BIASES["attention_bias"]},
        complete=complete_renormalised,
    ),
}
