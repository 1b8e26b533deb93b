"""Files of tiny models of many families, written by the rules of llama.cpp's converter: names of
tensors are those of the package `gguf`, and nothing is taken from what reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np

from tests.models.gguf.cases import Case
from tests.tiny import key_types, write_tokenizer

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


def write_file(
    case: Case,
    hf: Any,
    path: Path,
    keys: Mapping[str, Any] | None = None,
    spoil: Callable[[str, np.ndarray], np.ndarray | None] | None = None,
    rules: bool = True,
    part_length: int = 0,
    form: str = "F32",
    coder: bool = False,
) -> Path:
    """A file of a model, its matrices in the format `form`.

    `keys`: others, None: it lacks that one. `spoil`: what becomes of a tensor; None: it is left
    out. `rules`: without them numbers stay as transformers has them. `part_length`: how many
    tensors a part has; 0: it is one file. `coder`: with the tokenizer of `tests.tiny`, whose words
    the model then has. Returns the first part.
    """
    writer = lib.GGUFWriter(path, case.architecture, split_max_tensors=part_length)
    for key, value in {**_usual_keys(hf.config), **case.keys, **(keys or {})}.items():
        if value is not None:
            writer.add_key_value(f"{case.architecture}.{key}", value, *key_types(value))
    if coder:
        write_tokenizer(writer)
    else:
        writer.add_token_list([f"t{i}" for i in range(hf.config.vocab_size)])
        writer.add_pad_token_id(0)
        writer.add_eos_token_id(1)
    for name, data in [*_tensors(case, hf, rules), *case.tensors.items()]:
        found = data if spoil is None else spoil(name, data)
        if found is None:
            continue
        found = np.ascontiguousarray(found)
        kind = lib.GGMLQuantizationType[form]
        block_length, _ = lib.GGML_QUANT_SIZES[kind]
        is_matrix = found.ndim == 2 and "ffn_gate_inp" not in name and "position" not in name
        if form != "F32" and is_matrix and found.shape[1] % block_length == 0:
            writer.add_tensor(name, lib.quantize(found, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, found)
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
        if place.endswith("expert_bias") or "e_score_correction" in place:
            yield f"blk.{layer}.exp_probs_b.bias", data.reshape(-1)
            continue
        if ".kv_b_proj." in place:
            heads = data.reshape(config.num_attention_heads, -1, data.shape[-1])
            keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
            yield f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)
            yield f"blk.{layer}.attn_v_b.weight", values
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
