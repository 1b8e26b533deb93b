"""Files of families that transformers reads: right to the last key, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from foretell.models.gguf import gguf
from tests.models.decoder.families import BASE, WINDOW
from tests.tiny import key_types

WHOLE = {"tie_word_embeddings": True, "head_dim": 8, "query_pre_attn_scalar": 8}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
RMS = {"attention.layer_norm_rms_epsilon": 1e-6}
WIDTHS = {"attention.key_length": 8, "attention.value_length": 8}
SCALED = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
FACTORS = np.linspace(1, 8, 4, dtype=np.float32)
# Of each: a family, its fields, the name of its architecture, keys of its header.
Case = tuple[str, dict[str, Any], str, dict[str, Any]]
CASES: dict[str, Case] = {
    "caps": (
        "gemma2",
        {**WHOLE, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
        "gemma2",
        {**RMS, **WIDTHS, "attention.sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    ),
    "two rotations, one of them scaled": (
        "gemma3_text",
        {
            **WHOLE,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN},
        },
        "gemma3",
        {**RMS, **WIDTHS, **SCALED, "attention.sliding_window": WINDOW},
    ),
    "joined matrices": ("phi3", {"sliding_window": None, "rms_norm_eps": 1e-6}, "phi3", RMS),
    "factors by length": (
        "phi3",
        {
            "sliding_window": None,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": FACTORS.tolist(),
                "long_factor": FACTORS.tolist(),
                "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
            },
        },
        "phi3",
        {
            **RMS,
            "rope.scaling.type": "longrope",
            "rope.scaling.attn_factor": 1.25,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "norms with biases": (
        "starcoder2",
        {"sliding_window": None},
        "starcoder2",
        {"attention.layer_norm_epsilon": 1e-5},
    ),
    "a part of a head": (
        "stablelm",
        {"use_qkv_bias": True},
        "stablelm",
        {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 2},
    ),
    "positions that are learnt": (
        "gpt2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 48},
        "gpt2",
        {"attention.layer_norm_epsilon": 1e-5},
    ),
    "experts": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
        "qwen3moe",
        {
            **RMS,
            **WIDTHS,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
        },
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "norms with biases": ("rope.dimension_count=4", {"rope.dimension_count": 4}),
    "experts": ("expert_weights_scale=2.5", {"expert_weights_scale": 2.5}),
    "positions that are learnt": ("block_count is 4, and it has 3 layers", {"block_count": 4}),
    "caps": ("a key of tomorrow", {"a key of tomorrow": 1}),
}
TURNED = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")  # of GPT-2


def model_of(case: str) -> PreTrainedModel:
    torch.manual_seed(0)
    family, more, _, _ = CASES[case]
    config = CONFIG_MAPPING[family](**{**BASE, "initializer_range": 0.2, **more})
    hf = AutoModelForCausalLM.from_config(config).eval()
    for name, part in hf.named_parameters():
        if "norm" in name or "ln_" in name or "bias" in name:
            part.data += 0.2 * torch.randn_like(part)
    return hf  # type: ignore[no-any-return]


def file_of(
    case: str, hf: Any, path: Path, keys: Mapping[str, Any], extra: str | None = None
) -> Path:
    _, _, name, own = CASES[case]
    config = hf.config
    writer = lib.GGUFWriter(path, name)
    usual = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 48,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 4 if name == "gpt2" else config.num_key_value_heads,
        "rope.freq_base": 10000.0,
    }
    for key, value in {**usual, **own, **keys}.items():
        writer.add_key_value(f"{name}.{key}", value, *key_types(value))
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    kind = next(kind for kind, text in lib.MODEL_ARCH_NAMES.items() if text == name)
    names = lib.get_tensor_name_map(kind, config.num_hidden_layers)
    for place, tensor in hf.state_dict().items():
        data = tensor.float().numpy()
        if place == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if place.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                layer = place.split(".")[2]
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", half.copy())
            continue
        found = names.get_name(place, try_suffixes=(".weight", ".bias"))
        assert found, place
        if place.endswith("experts.down_proj"):
            found += ".weight"
        if name.startswith("gemma") and found.endswith("norm.weight"):
            data = data + 1
        if name == "gpt2" and found.endswith(TURNED):
            data = data.T
        writer.add_tensor(found, np.ascontiguousarray(data))
    if case == "factors by length":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", FACTORS)
    if extra is not None:
        writer.add_tensor(extra, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.inference_mode()
def rows(hf: Any) -> torch.Tensor:
    found: torch.Tensor = hf(torch.tensor([list(range(1, 60))])).logits[0]
    return found


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_file_has_the_model_s_own_rows(case: str, tmp_path: Path) -> None:
    hf = model_of(case)
    found = gguf.read_unpacked(file_of(case, hf, tmp_path / "m.gguf", {}), torch.float32)
    assert torch.allclose(rows(found), rows(hf), atol=1e-4 * float(rows(hf).abs().max()))


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_transformers_passes_over_is_refused_by_name(case: str, tmp_path: Path) -> None:
    words, keys = REFUSED[case]
    file = file_of(case, model_of(case), tmp_path / "m.gguf", keys)
    with pytest.raises(LookupError) as refused:
        gguf.read_unpacked(file, torch.float32)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_tensor_that_transformers_drops_is_seen(tmp_path: Path) -> None:
    case = "a part of a head"
    file = file_of(case, model_of(case), tmp_path / "m.gguf", {}, "blk.0.attn_output.bias")
    with pytest.raises(LookupError, match="blk.0.attn_output.bias, which are unknown here"):
        gguf.read_unpacked(file, torch.float32)
