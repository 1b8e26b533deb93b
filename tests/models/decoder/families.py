"""Tiny random transformers models, one for each family, large enough in their weights that greedy
texts vary.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
WINDOW = 8
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
# What a family needs beyond BASE, so that every kind of layer it has occurs.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 11,
    },
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "rope_parameters": ROPES,
    },
    "phi3": {"sliding_window": WINDOW},
    "olmo2": {},
    "smollm3": {
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere2": {"sliding_window": WINDOW, "layer_types": MIXED, "logit_scale": 0.25},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "glm4": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "qwen3_moe": {**MOE, "head_dim": 8},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "nanochat": {},
}
# Families that are not proven, and what it takes to build the kind of layer that matters.
OTHERS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "seed_oss": {},
    "apertus": {},
    "olmo3": {"sliding_window": WINDOW},
    "helium": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "falcon": {"alibi": True},
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "head_dim": 8,
        "num_local_experts": 2,
        "layer_types": ["chunked_attention"] * 3,
    },
    "qwen2_moe": {
        **MOE,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
    },
}
# Families that foretell/models/families describes, at sizes that the C library computes, with all
# switched on that a family has. One that is not named here has what SIZES says.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "head_dim": 32,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
ROUTED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
TURNED_IN_PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DESCRIBED: dict[str, dict[str, Any]] = {
    "llama": BIASES,
    "arcee": BIASES,
    "cohere": {"attention_bias": True, "logit_scale": 0.25},
    "cohere2": {**WINDOWS, "attention_bias": True, "logit_scale": 0.25},
    "ernie4_5": {"use_bias": True},
    "exaone4": WINDOWS,
    "gemma2": {
        **WINDOWS,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 11,
    },
    "gemma3_text": {
        **WINDOWS,
        "rope_parameters": ROPES,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 11,
    },
    "dots1": {**ROUTED_EXPERTS, **WINDOWS},
    "ernie4_5_moe": {
        "moe_intermediate_size": 64,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_layer_start_index": 1,
        "use_bias": True,
    },
    "flex_olmo": EXPERTS,
    "glm4_moe": {**ROUTED_EXPERTS, "attention_bias": True, "use_qk_norm": True},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 160},
    "gpt_oss": {**LOCAL_EXPERTS, "sliding_window": WINDOW, "layer_types": MIXED},
    "jais2": BIASES,
    "minimax_m2": {**LOCAL_EXPERTS, "rope_parameters": TURNED_IN_PART},
    "solar_open": ROUTED_EXPERTS,
    "vaultgemma": {
        **WINDOWS,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 11,
    },
    "granite": {**BIASES, **MULTIPLIERS},
    "granite_swa": {
        **BIASES,
        **MULTIPLIERS,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "layer_rope_theta": [10000.0] * 3,
    },
    "granitemoe": {**LOCAL_EXPERTS, **MULTIPLIERS},
    "ministral": WINDOWS,
    "mistral": WINDOWS,
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": WINDOW},
    "nemotron": BIASES,
    "olmo3": {**WINDOWS, "rope_parameters": ROPES},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 160},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": WINDOWS,
    "qwen2_moe": {**EXPERTS, "mlp_only_layers": [1]},
    "qwen3": {**WINDOWS, "attention_bias": True},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "smollm3": {**WINDOWS, **BIASES, "no_rope_layers": [1, 0, 1]},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": WINDOW},
}
# What a family may be beside that: (family, fields).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox, half after half": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt2, scores by the layer": (
        "gpt2",
        {
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
        },
    ),
    "opt, without biases": (
        "opt",
        {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": True},
    ),
    "stablelm, both halves at once": ("stablelm", {"use_parallel_residual": True}),
    "qwen2_moe, renormalised": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen3_moe, not renormalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "exaone4, turned everywhere": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
}
STATE_SPACE = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
DELTA = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# With recurrent layers. Where there are groups of heads there are two.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "falcon_h1": {**STATE_SPACE, "head_dim": 8, "mamba_d_ssm": 64, "ssm_in_multiplier": 0.8},
    "bamba": {**STATE_SPACE, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **STATE_SPACE,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "qwen3_next": {**MOE, "shared_expert_intermediate_size": 24, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**MOE, "shared_expert_intermediate_size": 24, **DELTA},
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**MOE, "layer_types": ["conv", "full_attention", "conv"]},
}


def described_config(case: str) -> Any:
    """The configuration of a described family, or of a variant of one."""
    family, more = VARIANTS.get(case, (case, {}))
    usual = common_fields(family, BASE | SIZES)
    return AutoConfig.for_model(family, **{**usual, **DESCRIBED.get(family, {}), **more})


def described(case: str) -> PreTrainedModel:
    """A model of a described family, or of a variant of one, with weights that bfloat16 holds.

    Norms, biases and sinks are far enough from what they start with to be missed.
    """
    return copy.deepcopy(_described(case))


@lru_cache(4)  # a family's tests follow each other
def _described(case: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(described_config(case)).eval()
    generator = torch.Generator().manual_seed(0)
    tensors = [*model.named_parameters()]
    tensors += [(name, p) for name, p in model.named_buffers() if "bias" in name]
    with torch.no_grad():
        for name, p in tensors:
            drawn = torch.randn(p.shape, generator=generator)
            is_router = name.endswith(("router.weight", "mlp.gate.weight"))
            size = 0.3 if "embed" in name else 0.2 if is_router else 0.12
            values = size * drawn if p.ndim > 1 else p.nan_to_num(0.0) + 0.25 * drawn
            p.copy_(values.bfloat16())
    model.generation_config.eos_token_id = None
    return model  # type: ignore[no-any-return]


def config(family: str, **more: Any) -> Any:
    """The configuration of a family, named above or any other with the usual fields."""
    own_fields = {**(FAMILIES | OTHERS | RECURRENT).get(family, {}), **more}
    return AutoConfig.for_model(family, **{**common_fields(family, BASE), **own_fields})


def common_fields(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of the usual fields that a family has under these names."""
    if family != "gpt2":
        return fields
    return {k: v for k, v in fields.items() if k.endswith("_id") or k == "vocab_size"}


def tiny(
    family: str, noise: float = 0.0, dtype: torch.dtype = torch.float32, **more: Any
) -> PreTrainedModel:
    """The same model every time; with `noise`, a relative that agrees with it in part: a draft
    model.

    Matrices are drawn from N(0, 0.3), vectors (norms, biases, sinks) vary around what the family
    starts them with.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, **more)).eval()
    weights, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=weights) + noise * torch.randn(
                p.shape, generator=other
            )
            p.copy_(0.3 * drawn if p.ndim > 1 else p.nan_to_num(0.0) + 0.1 * drawn)
    model.generation_config.eos_token_id = None
    if dtype == torch.float64:  # grouped matrix products exist in no more than float32
        model.config._experts_implementation = "eager"
    return model.to(dtype)
