"""Files of every family against the models that they were written from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np
import pytest
import torch

from foretell.models.decoder.packed import PackedLinear, without_rounding
from foretell.models.decoder.packed_experts import PackedExperts
from foretell.models.gguf import gguf
from foretell.models.gguf.architecture import known_architectures
from foretell.models.gguf.architectures import gemma
from foretell.native import library
from tests.models.gguf.cases import CASES, model_of
from tests.models.gguf.files import write_file

IDS = torch.tensor([list(range(1, 40))])


@torch.inference_mode()
def rows(hf: Any) -> torch.Tensor:
    found: torch.Tensor = hf(IDS).logits[0]
    return found


def are_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@cache
def original(name: str) -> tuple[Any, torch.Tensor]:
    """A model and its rows."""
    hf = model_of(CASES[name])
    return hf, rows(hf)


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_model_s_own_rows(name: str, tmp_path: Path) -> None:
    hf, wanted = original(name)
    found = gguf.read_unpacked(write_file(CASES[name], hf, tmp_path / "m.gguf"), torch.float32)
    assert are_near(rows(found), wanted)


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(known_architectures())
    assert set(known_architectures()) <= set(lib.MODEL_ARCH_NAMES.values())


def test_the_page_names_every_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gguf.md").read_text("utf-8")
    assert not [name for name in known_architectures() if f"`{name}`" not in page]


# Of a family, tensors that are changed as a slip in reading would change them.
def _without_one(name: str, data: np.ndarray) -> np.ndarray:
    return data - 1 if name.endswith("norm.weight") else data


def _backwards(name: str, data: np.ndarray) -> np.ndarray:
    return data[::-1] if "_exps." in name else data


def _mixed_rows(name: str, data: np.ndarray) -> np.ndarray:
    return np.roll(data, 1, axis=0) if ".attn_qkv." in name else data


def _no_biases(name: str, data: np.ndarray) -> np.ndarray:
    return np.zeros_like(data) if name.endswith(".bias") else data


def _no_sinks(name: str, data: np.ndarray) -> np.ndarray:
    return np.zeros_like(data) if "sinks" in name else data


SLIPS = {
    "gemma": _without_one,
    "gemma2": _without_one,
    "gemma3": _without_one,
    "nemotron": _without_one,
    "mixtral": _backwards,
    "qwen2moe": _backwards,
    "deepseek 3": _backwards,
    "gptneox": _mixed_rows,
    "starcoder2": _no_biases,
    "qwen2": _no_biases,
    "phi2": _no_biases,
    "gpt-oss": _no_sinks,
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_of_numbers_are_seen(name: str, tmp_path: Path) -> None:
    hf, wanted = original(name)
    path = write_file(CASES[name], hf, tmp_path / "m.gguf", spoil=SLIPS[name])
    assert not are_near(rows(gguf.read_unpacked(path, torch.float32)), wanted)


@pytest.mark.parametrize("name", ["llama", "mixtral", "granite", "smollm3", "olmo", "gptneox"])
def test_slips_of_the_order_of_rows_are_seen(name: str, tmp_path: Path) -> None:
    hf, wanted = original(name)
    path = write_file(CASES[name], hf, tmp_path / "m.gguf", rules=False)
    assert not are_near(rows(gguf.read_unpacked(path, torch.float32)), wanted)


SWAPPED = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate"}


@pytest.mark.parametrize("name", ["gemma3", "qwen3moe", "gpt-oss", "lfm2", "granitemoe"])
def test_a_gate_is_not_what_it_gates(name: str, tmp_path: Path) -> None:
    (hf, wanted), case = original(name), CASES[name]
    written: dict[str, np.ndarray] = {}
    write_file(case, hf, tmp_path / "m.gguf", spoil=lambda at, data: written.setdefault(at, data))

    def swap(at: str, data: np.ndarray) -> np.ndarray:
        parts = at.split(".")
        kind = parts[2].removesuffix("_exps") if len(parts) > 2 else ""
        if kind in SWAPPED:
            parts[2] = parts[2].replace(kind, SWAPPED[kind])
        return written[".".join(parts)]

    path = write_file(case, hf, tmp_path / "swapped.gguf", spoil=swap)
    assert not are_near(rows(gguf.read_unpacked(path, torch.float32)), wanted)


# Of a family: a key that it is written with, in place of what; part of the refusal.
LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("rope.dimension_count=4", {"rope.dimension_count": 4}),
    "olmo3": (
        "sliding_window_pattern of 3 values",
        {"attention.sliding_window_pattern": [True, False, True]},
    ),
    "olmo": ("layer_norm_epsilon=", {"attention.layer_norm_epsilon": 1e-3}),
    "phi3": ("dimension_count=10", {"rope.dimension_count": 10}),
    "qwen3moe": ("expert_weights_scale=2.5", {"expert_weights_scale": 2.5}),
    "mixtral": ("lacks llama.expert_used_count", {"expert_used_count": None}),
    "gptneox": ("lacks gptneox.attention.layer_norm_eps", {"attention.layer_norm_epsilon": None}),
    "gpt-oss": ("expert_gating_func", {"expert_gating_func": 2}),
    "lfm2": ("head_count_kv=[2, 1]", {"attention.head_count_kv": [2, 1]}),
    "phi2": ("phi2.a_key_of_tomorrow", {"a_key_of_tomorrow": 1}),
    "deepseek 2": ("expert_weights_norm=True beside a softmax", {"expert_weights_norm": True}),
    "glm4moe": ("expert_gating_func=1, and what computes it 2", {"expert_gating_func": 1}),
    "hunyuan-moe": ("expert_shared_count=2", {"expert_shared_count": 2}),
    "cohere2": ("expert_count=8", {"expert_count": 8}),
    "stablelm": ("ffn_norm", {"use_parallel_residual": True}),
    "gpt2": ("block_count is 3, and it has 2 layers", {"block_count": 3}),
    "phi3 with factors": ("rope.scaling.type='linear'", {"rope.scaling.type": "linear"}),
}


@pytest.mark.parametrize("name", LIES)
def test_what_is_not_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    words, keys = LIES[name]
    path = write_file(CASES[name], original(name)[0], tmp_path / "m.gguf", keys)
    with pytest.raises(LookupError) as refused:
        gguf.read_unpacked(path, torch.float32)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gemma3", "blk.1.post_ffw_norm.weight"),
        ("starcoder2", "blk.0.ffn_up.bias"),
        ("qwen2moe", "blk.1.ffn_up_exps.weight"),
        ("gpt-oss", "blk.0.attn_sinks.weight"),
        ("command-r", "output_norm.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    path = write_file(
        CASES[name],
        original(name)[0],
        tmp_path / "m.gguf",
        spoil=lambda at, data: None if at == tensor else data,
    )
    with pytest.raises(LookupError, match=f"it lacks {tensor}"):
        gguf.read_unpacked(path, torch.float32)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "blk.0.attn_q.weight"),
        ("gptneox", "blk.0.attn_qkv.bias"),
        ("deepseek 3", "blk.1.attn_k_b.weight"),
        ("qwen3moe", "blk.0.ffn_up_exps.weight"),
        ("granitemoe with a shared expert", "blk.0.ffn_up_shexp.weight"),
        ("gpt-oss", "blk.1.ffn_gate_exps.bias"),
        ("stablelm with norms", "blk.0.attn_k_norm.weight"),
        ("lfm2", "blk.0.shortconv.conv.weight"),
    ],
)
def test_a_tensor_of_another_size_is_refused_in_a_line(
    name: str, tensor: str, tmp_path: Path
) -> None:
    def cut(at: str, data: np.ndarray) -> np.ndarray:
        if at != tensor:
            return data
        return data[:-1] if data.ndim == 1 else data.reshape(-1, data.shape[-1])[:-1, :-1]

    path = write_file(CASES[name], original(name)[0], tmp_path / "m.gguf", spoil=cut)
    with pytest.raises(LookupError) as refused:
        gguf.read_unpacked(path, torch.float32)
    assert type(refused.value) is LookupError and "\n" not in str(refused.value)


def test_a_family_that_is_unknown_is_named(tmp_path: Path) -> None:
    writer = lib.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LookupError, match="'rwkv7', which is not described here"):
        gguf.read_unpacked(tmp_path / "m.gguf", torch.float32)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    case, hf = CASES["glm4moe"], model_of(CASES["glm4moe"])
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    more = {"blk.2.nextn.eh_proj.weight": np.ones((32, 64), np.float32)}
    extended = replace(case, tensors=more)
    found = gguf.read_unpacked(write_file(extended, hf, tmp_path / "m.gguf", keys), torch.float32)
    assert are_near(rows(found), rows(hf))


def test_an_older_file_has_keys_and_values_of_a_latent_in_one(tmp_path: Path) -> None:
    hf, case = model_of(CASES["deepseek 2"]), CASES["deepseek 2"]
    whole = {
        f"blk.{layer}.attn_kv_b.weight": hf.model.layers[layer].self_attn.kv_b_proj.weight
        for layer in range(2)
    }
    older = replace(case, tensors={name: part.detach().numpy() for name, part in whole.items()})
    keys = {
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "attention.key_length": 16,
        "attention.value_length": 12,
        "attention.head_count_kv": 4,
    }
    path = write_file(
        older,
        hf,
        tmp_path / "m.gguf",
        keys,
        spoil=lambda at, data: None if "attn_k_b" in at or "attn_v_b" in at else data,
    )
    assert are_near(rows(gguf.read_unpacked(path, torch.float32)), rows(hf))


def test_experts_gates_may_be_joined(tmp_path: Path) -> None:
    hf, case = model_of(CASES["qwen3moe"]), CASES["qwen3moe"]
    joined = {
        f"blk.{layer}.ffn_gate_up_exps.weight": hf.model.layers[layer].mlp.experts.gate_up_proj
        for layer in range(2)
    }
    newer = replace(case, tensors={name: part.detach().numpy() for name, part in joined.items()})
    path = write_file(
        newer,
        hf,
        tmp_path / "m.gguf",
        spoil=lambda at, data: (
            None if at.endswith(("_gate_exps.weight", "ffn_up_exps.weight")) else data
        ),
    )
    assert are_near(rows(gguf.read_unpacked(path, torch.float32)), rows(hf))


def test_phi_2_may_have_queries_keys_and_values_in_one(tmp_path: Path) -> None:
    hf, case = model_of(CASES["phi2"]), CASES["phi2"]
    written: dict[str, np.ndarray] = {}
    write_file(case, hf, tmp_path / "m.gguf", spoil=lambda at, data: written.setdefault(at, data))
    joined = {
        f"blk.{layer}.attn_qkv.{end}": np.concatenate(
            [written[f"blk.{layer}.attn_{part}.{end}"] for part in "qkv"]
        )
        for layer in range(2)
        for end in ("weight", "bias")
    }
    parts = (".attn_q.", ".attn_k.", ".attn_v.")
    path = write_file(
        replace(case, tensors=joined),
        hf,
        tmp_path / "joined.gguf",
        spoil=lambda at, data: None if any(part in at for part in parts) else data,
    )
    assert are_near(rows(gguf.read_unpacked(path, torch.float32)), rows(hf))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_the_largest_gemma_scales_scores_by_its_width(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_count = {"gemma2": 2, "gemma3": 7}[kind]
    assert gemma.LARGE == {"gemma2": 46, "gemma3": 62}
    monkeypatch.setitem(gemma.LARGE, kind, layer_count)
    case = CASES[kind]
    more = {"num_attention_heads": 2, "query_pre_attn_scalar": 16}
    hf = model_of(replace(case, fields={**case.fields, **more}))
    found = gguf.read_unpacked(write_file(case, hf, tmp_path / "m.gguf"), torch.float32)
    assert are_near(rows(found), rows(hf))


# Families whose matrices lie in files and in models by different rules.
PACKED = (
    *("llama", "gemma2", "gemma3", "phi2", "phi3", "gpt2", "gptneox", "cohere2", "nemotron"),
    *("mixtral", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "gpt-oss"),
)


@pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
@pytest.mark.parametrize("name", PACKED)
def test_matrices_stay_packed(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    widths = ("n_inner", "intermediate_size", "moe_intermediate_size")
    widths += ("shared_expert_intermediate_size",)
    sizes = {"intermediate_size": 64} | {field: 64 for field in widths if field in case.fields}
    if name == "gpt2":
        sizes = {"n_inner": 64}
    keys = {key: 64 if "feed_forward_length" in key else value for key, value in case.keys.items()}
    case = replace(case, fields={**case.fields, **sizes}, keys=keys)
    hf = model_of(case)
    path = write_file(case, hf, tmp_path / "m.gguf", form="Q8_0")
    packed, plain = gguf.read_packed(path), gguf.read_unpacked(path, torch.float32)
    assert not any(type(part) is torch.nn.Linear for part in packed.modules())
    assert isinstance(packed.get_output_embeddings(), PackedLinear)
    with without_rounding():
        ours, theirs = rows(packed.float()).flatten(0, -2), rows(plain).flatten(0, -2)
    if any(isinstance(part, PackedExperts) for part in packed.modules()):
        # Routers are in bfloat16, and near ties choose other experts: most rows decide.
        distances = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert float(distances.median()) <= 1e-2
    else:
        assert float((ours - theirs).norm() / theirs.norm()) <= 1e-2  # norms are in bfloat16
