"""Files of tiny models of many families, written by the rules of llama.cpp's converter: names of
tensors are those of the package `gguf`, and nothing is taken from what reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.models.decoder.families import BASE, MOE, WINDOW
from tests.tiny import key_types

Named = tuple[str, np.ndarray]
KEYS: dict[str, tuple[str, ...]] = {  # of a configuration, its fields by key
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
}
PERMUTED = ("llama", "granite", "granitemoe", "smollm3", "arcee", "olmo")
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron")
TURNED = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")  # of GPT-2
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
        elif "experts" in name:
            part.data = 0.2 * torch.randn_like(part)
    return hf.eval()  # type: ignore[no-any-return]


def write_file(
    case: Case,
    hf: Any,
    path: Path,
    keys: Mapping[str, Any] | None = None,
    spoil: Callable[[str, np.ndarray], np.ndarray | None] | None = None,
    rules: bool = True,
    part_length: int = 0,
) -> Path:
    """A file of a model in float32. `keys`: others, None: it lacks that one. `spoil`: what becomes
    of a tensor; None: it is left out. `rules`: without them numbers stay as transformers has them.
    `part_length`: how many tensors a part has; 0: it is one file. Returns the first part.
    """
    writer = lib.GGUFWriter(path, case.architecture, split_max_tensors=part_length)
    for key, value in {**_usual_keys(hf.config), **case.keys, **(keys or {})}.items():
        if value is not None:
            writer.add_key_value(f"{case.architecture}.{key}", value, *key_types(value))
    writer.add_token_list([f"t{i}" for i in range(hf.config.vocab_size)])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    for name, data in [*_tensors(case, hf, rules), *case.tensors.items()]:
        found = data if spoil is None else spoil(name, data)
        if found is not None:
            writer.add_tensor(name, np.ascontiguousarray(found))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not part_length else sorted(path.parent.glob(f"{path.stem}-00001-of-*"))[0]


def _usual_keys(config: Any) -> dict[str, Any]:
    keys = {
        key: next((getattr(config, name) for name in names if getattr(config, name, None)), None)
        for key, names in KEYS.items()
    }
    rotation = getattr(config, "rope_parameters", None) or {}
    rotation = rotation.get("full_attention", rotation)
    return keys | {"rope.freq_base": rotation.get("rope_theta")}


def _tensors(case: Case, hf: Any, rules: bool) -> Iterator[Named]:
    config = hf.config
    kinds = {name: kind for kind, name in lib.MODEL_ARCH_NAMES.items()}
    names = lib.get_tensor_name_map(kinds[case.architecture], config.num_hidden_layers)
    stacked: dict[str, list[np.ndarray]] = {}
    for place, tensor in hf.state_dict().items():
        data = tensor.float().numpy()
        if place == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = next((part for part in place.split(".") if part.isdigit()), "")
        if ".experts." in place:
            yield from _experts(case, place, layer, data)
            continue
        if ".norms." in place:  # of StableLM, one a head
            stacked.setdefault(place.split(".norms.")[0], []).append(data)
            continue
        if ".shared_mlp.input_linear" in place:
            halves = zip(("gate", "up"), np.split(data, 2), strict=True)
            yield from ((f"blk.{layer}.ffn_{part}_shexp.weight", half) for part, half in halves)
            continue
        place = place.replace("block_sparse_moe.router", "block_sparse_moe.router.layer")
        place += ".weight" if place.endswith("sinks") else ""
        found = names.get_name(place, try_suffixes=(".weight", ".bias"))
        assert found, place
        yield found, _converted(case, config, found, data) if rules else data
    for place, norms in stacked.items():
        yield f"{names.get_name(place)}.weight", np.stack(norms)


def _converted(case: Case, config: Any, name: str, data: np.ndarray) -> np.ndarray:
    """A tensor's numbers as the converter writes them."""
    if (
        case.architecture in PERMUTED
        and ".attn_" in name
        and name.split(".")[2]
        in (
            "attn_q",
            "attn_k",
        )
    ):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        halves = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
        return halves.swapaxes(1, 2).reshape(data.shape)
    if case.architecture in SHIFTED and name.endswith("norm.weight"):
        return data + 1
    if case.architecture == "gpt2" and name.endswith(TURNED):
        return data.T
    if case.architecture == "gptneox" and ".attn_qkv." in name:
        parts = data.reshape(config.num_attention_heads, 3, -1, *data.shape[1:])
        return np.concatenate([parts[:, i].reshape(-1, *data.shape[1:]) for i in range(3)])
    return data.squeeze(1) if "shortconv.conv" in name else data


def _experts(case: Case, place: str, layer: str, data: np.ndarray) -> Iterator[Named]:
    """All experts' matrices of a kind, apart where transformers has them joined."""
    end = "bias" if place.endswith("bias") else "weight"
    is_oss = case.architecture == "gpt-oss"
    data = data.swapaxes(1, 2) if is_oss and end == "weight" else data
    if "down_proj" in place:
        yield f"blk.{layer}.ffn_down_exps.{end}", data
        return
    middle = data.shape[1] // 2
    parts = (data[:, ::2], data[:, 1::2]) if is_oss else (data[:, :middle], data[:, middle:])
    for name, part in zip(("gate", "up"), parts, strict=True):
        yield f"blk.{layer}.ffn_{name}_exps.{end}", part
