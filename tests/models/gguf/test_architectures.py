"""Files of every family against the models that they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np
import pytest
import torch

from foretell.models.gguf import gguf
from foretell.models.gguf.architecture import known_architectures
from tests.models.gguf.files import CASES, model_of, write_file

IDS = torch.tensor([list(range(1, 40))])


@torch.inference_mode()
def rows(hf: Any) -> torch.Tensor:
    found: torch.Tensor = hf(IDS).logits[0]
    return found


def are_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_model_s_own_rows(name: str, tmp_path: Path) -> None:
    hf = model_of(CASES[name])
    found = gguf.read_unpacked(write_file(CASES[name], hf, tmp_path / "m.gguf"), torch.float32)
    assert are_near(rows(found), rows(hf))


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(known_architectures())
    assert set(known_architectures()) <= set(lib.MODEL_ARCH_NAMES.values())


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
    "gptneox": _mixed_rows,
    "starcoder2": _no_biases,
    "qwen2": _no_biases,
    "phi2": _no_biases,
    "gpt-oss": _no_sinks,
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_of_numbers_are_seen(name: str, tmp_path: Path) -> None:
    hf = model_of(CASES[name])
    path = write_file(CASES[name], hf, tmp_path / "m.gguf", spoil=SLIPS[name])
    assert not are_near(rows(gguf.read_unpacked(path, torch.float32)), rows(hf))


@pytest.mark.parametrize("name", ["llama", "mixtral", "granite", "smollm3", "olmo", "gptneox"])
def test_slips_of_the_order_of_rows_are_seen(name: str, tmp_path: Path) -> None:
    hf = model_of(CASES[name])
    path = write_file(CASES[name], hf, tmp_path / "m.gguf", rules=False)
    assert not are_near(rows(gguf.read_unpacked(path, torch.float32)), rows(hf))


SWAPPED = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate"}


@pytest.mark.parametrize("name", ["gemma3", "qwen3moe", "gpt-oss", "lfm2", "granitemoe"])
def test_a_gate_is_not_what_it_gates(name: str, tmp_path: Path) -> None:
    hf, case = model_of(CASES[name]), CASES[name]
    written: dict[str, np.ndarray] = {}
    write_file(case, hf, tmp_path / "m.gguf", spoil=lambda at, data: written.setdefault(at, data))

    def swap(at: str, data: np.ndarray) -> np.ndarray:
        parts = at.split(".")
        kind = parts[2].removesuffix("_exps") if len(parts) > 2 else ""
        if kind in SWAPPED:
            parts[2] = parts[2].replace(kind, SWAPPED[kind])
        return written[".".join(parts)]

    path = write_file(case, hf, tmp_path / "swapped.gguf", spoil=swap)
    assert not are_near(rows(gguf.read_unpacked(path, torch.float32)), rows(hf))


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
    "phi2": ("qwen", {"qwen": 1}),
    "cohere2": ("expert_count=8", {"expert_count": 8}),
    "stablelm": ("ffn_norm", {"use_parallel_residual": True}),
    "gpt2": ("block_count is 3, and it has 2 layers", {"block_count": 3}),
    "phi3 with factors": ("rope.scaling.type='linear'", {"rope.scaling.type": "linear"}),
}


@pytest.mark.parametrize("name", LIES)
def test_what_is_not_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    words, keys = LIES[name]
    path = write_file(CASES[name], model_of(CASES[name]), tmp_path / "m.gguf", keys)
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
        model_of(CASES[name]),
        tmp_path / "m.gguf",
        spoil=lambda at, data: None if at == tensor else data,
    )
    with pytest.raises(LookupError, match=f"it lacks {tensor}"):
        gguf.read_unpacked(path, torch.float32)


def test_a_family_that_is_unknown_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    writer = lib.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LookupError, match="'rwkv7', which is not described here; it takes arcee"):
        gguf.read_unpacked(tmp_path / "m.gguf", torch.float32)
