"""Tiny models of the families that .gguf files hold, with what the converter says of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.models.decoder.families import BASE, MOE, WINDOW

MIXED = ["sliding_attention", "full_attention"]
WIDTH = {"attention.key_length": 8, "attention.value_length": 8}
WINDOWED = {"attention.sliding_window": WINDOW}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SCALES = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
SCALE_KEYS = {
    "embedding_scale": 3.0,
    "residual_scale": 0.7,
    "logit_scale": 2.0,
    "attention.scale": 0.2,
}


@dataclass
class Case:
    """A family: its name in files, in transformers, fields of its configuration, keys that its
    converter writes beside the usual ones, and tensors.
    """

    architecture: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)


CASES = {
    "llama": Case("llama", "llama"),
    "llama with biases": Case("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen3": Case("qwen3", "qwen3", {"head_dim": 8}, WIDTH),
    "mixtral": Case("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": Case("granite", "granite", SCALES, SCALE_KEYS),
    "granite without scales": Case("granite", "granite", {"attention_multiplier": 8**-0.5}),
    "smollm3": Case("smollm3", "smollm3", {"num_hidden_layers": 4}),
    "arcee": Case("arcee", "arcee", {"rope_parameters": {**YARN, "rope_theta": 1e4}}, YARN_KEYS),
    "seed_oss": Case(
        "seed_oss",
        "seed_oss",
        {"head_dim": 16},
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
        },
    ),
    "ernie4_5": Case("ernie4_5", "ernie4_5", {"head_dim": 8}, WIDTH),
    "hunyuan": Case(
        "hunyuan-dense",
        "hunyuan_v1_dense",
        {"head_dim": 8},
        {
            **WIDTH,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 262144,
        },
    ),
    "gemma": Case("gemma", "gemma", {"head_dim": 8, "tie_word_embeddings": True}, WIDTH),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
        },
        {
            **WIDTH,
            **WINDOWED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 8,
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": PLAIN,
            },
        },
        {
            **WIDTH,
            **WINDOWED,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "olmo": Case(
        "olmo",
        "olmo",
        {"clip_qkv": 0.5},
        {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.clamp_kqv": 0.5,
        },
    ),
    "olmo2": Case("olmo2", "olmo2"),
    "olmo3": Case(
        "olmo2",
        "olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e4},
                "sliding_attention": PLAIN,
            },
        },
        {**WINDOWED, **YARN_KEYS, "attention.sliding_window_pattern": [True, False]},
    ),
    "exaone4": Case(
        "exaone4",
        "exaone4",
        {"sliding_window": WINDOW, "layer_types": MIXED},
        {**WINDOWED, "attention.sliding_window_pattern": [True, False]},
    ),
    "exaone4 without windows": Case(
        "exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "glm4": Case("glm4", "glm4", {"head_dim": 8}, {"rope.dimension_count": 4}),
    "command-r": Case(
        "command-r",
        "cohere",
        {"logit_scale": 0.25, "tie_word_embeddings": True},
        {"logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "command-r with norms": Case(
        "command-r",
        "cohere",
        {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
        {"logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "cohere2": Case(
        "cohere2",
        "cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
        {
            **WINDOWED,
            "logit_scale": 0.25,
            "rope.scaling.type": "none",
            "rope.dimension_count": 8,
            "vocab_size": 97,
        },
    ),
    "gpt2": Case(
        "gpt2",
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
        {"attention.head_count_kv": None},
    ),
    "gptneox": Case(
        "gptneox",
        "gpt_neox",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {
            "rope.dimension_count": 4,
            "use_parallel_residual": True,
            "attention.head_count_kv": None,
        },
    ),
    "gptneox one after another": Case(
        "gptneox",
        "gpt_neox",
        {
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
            "use_parallel_residual": False,
        },
        {
            "rope.dimension_count": 2,
            "use_parallel_residual": False,
            "attention.head_count_kv": None,
        },
    ),
    "starcoder2": Case("starcoder2", "starcoder2", {"sliding_window": None}),
    "stablelm": Case("stablelm", "stablelm", {"use_qkv_bias": True}, {"rope.dimension_count": 2}),
    "stablelm with norms": Case(
        "stablelm",
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True},
        {"rope.dimension_count": 2, "use_parallel_residual": True},
    ),
    "nemotron": Case(
        "nemotron",
        "nemotron",
        {"norm_eps": 1e-5},
        {
            "attention.layer_norm_epsilon": 1e-5,
            "rope.dimension_count": 4,
            "vocab_size": 97,
            "rope.scaling.type": "none",
        },
    ),
    "phi2": Case("phi2", "phi", {"num_key_value_heads": 4}, {"rope.dimension_count": 4}),
    "phi3": Case("phi3", "phi3", {"sliding_window": None}, {"attention.sliding_window": 0}),
    "phi3 with factors": Case(
        "phi3",
        "phi3",
        {
            "sliding_window": WINDOW,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 3.0],
                "long_factor": [2.0, 6.0],
                "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
            },
        },
        {
            **WINDOWED,
            "rope.dimension_count": 4,
            "rope.scaling.attn_factor": 1.25,
            "rope.scaling.original_context_length": 64,
        },
        {
            "rope_factors_short.weight": np.array([1, 3], np.float32),
            "rope_factors_long.weight": np.array([2, 6], np.float32),
        },
    ),
    "qwen2moe": Case(
        "qwen2moe",
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 40},
        {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": Case(
        "qwen3moe",
        "qwen3_moe",
        {**MOE, "head_dim": 8, "norm_topk_prob": True},
        {**WIDTH, "expert_feed_forward_length": 24},
    ),
    "olmoe": Case("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": Case(
        "granitemoe",
        "granitemoe",
        {**SCALES, "num_local_experts": 4, "num_experts_per_tok": 2},
        SCALE_KEYS,
    ),
    "granitemoe with a shared expert": Case(
        "granitemoe",
        "granitemoeshared",
        {
            **SCALES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
        {**SCALE_KEYS, "expert_shared_feed_forward_length": 40},
    ),
    "gpt-oss": Case(
        "gpt-oss",
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False},
        },
        {**WIDTH, **WINDOWED, **YARN_KEYS, "expert_feed_forward_length": 48},
    ),
    "lfm2": Case(
        "lfm2",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "vocab_size": 97},
    ),
}

# Experts beside those that all tokens share. Layer 0 has none.
GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
GROUP_KEYS = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 24,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "v_head_dim": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 12,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "vocab_size": 97,
}
CASES |= {
    "deepseek 3": Case(
        "deepseek2",
        "deepseek_v3",
        {
            **GROUPS,
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            **GROUP_KEYS,
            **LATENT_KEYS,
            **YARN_KEYS,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "deepseek 2": Case(
        "deepseek2",
        "deepseek_v2",
        {
            **GROUPS,
            **LATENT,
            "norm_topk_prob": False,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
        {
            **GROUP_KEYS,
            **LATENT_KEYS,
            "expert_gating_func": 1,
            "expert_weights_norm": None,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "deepseek 2 light": Case(
        "deepseek2",
        "deepseek_v2",
        {**GROUPS, **LATENT, "norm_topk_prob": False, "q_lora_rank": None},
        {
            **GROUP_KEYS,
            **LATENT_KEYS,
            "expert_gating_func": None,
            "expert_weights_norm": None,
            "attention.q_lora_rank": None,
        },
    ),
    "glm4moe": Case(
        "glm4moe",
        "glm4_moe",
        {**GROUPS, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
        {**GROUP_KEYS, **WIDTH, "rope.dimension_count": 4, "nextn_predict_layers": 0},
    ),
    "dots1": Case(
        "dots1", "dots1", {**GROUPS, "head_dim": 8, "sliding_window": None}, {**GROUP_KEYS, **WIDTH}
    ),
    "ernie4_5-moe": Case(
        "ernie4_5-moe",
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
        },
        {
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_shared_count": 2,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 24,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "hunyuan-moe": Case(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
        {
            **WIDTH,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 48,
            "expert_shared_count": 1,
        },
    ),
    "lfm2moe": Case(
        "lfm2moe",
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
        {
            "attention.head_count_kv": [0, 2],
            "shortconv.l_cache": 3,
            "expert_feed_forward_length": 24,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
}


def model_of(case: Case) -> PreTrainedModel:
    """Random, with norms and biases that are not those of a new model."""
    torch.manual_seed(0)
    sizes = {**BASE, "num_hidden_layers": 2, "initializer_range": 0.2}
    hf = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[case.model_type](**{**sizes, **case.fields})
    )
    for name, part in hf.named_parameters():
        if any(word in name for word in ("norm", "ln_", "bias", "sinks")):
            part.data += 0.2 * torch.randn_like(part)
        elif "experts" in name or ".gate.weight" in name:
            part.data = 0.2 * torch.randn_like(part)
    for name, part in hf.named_buffers():
        if "bias" in name and part.dtype == torch.float32:  # of scores, for the choice of experts
            part += 0.2 * torch.randn_like(part)
    return hf.eval()  # type: ignore[no-any-return]
