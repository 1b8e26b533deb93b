"""Channels that are evened out: the same model, rounded better."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foretell.models.decoder.packed import pack_layers
from foretell.models.decoder.smoothing import round_layers, smooth_layers
from tests.models.decoder.families import tiny
from tests.ops.test_memory import linux, resident


def uneven() -> Any:
    """A small model some of whose channels are a hundred times larger than the others."""
    hf = tiny("llama", dtype=torch.float32, hidden_size=64)
    with torch.no_grad():
        for layer in hf.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[::16] *= 100
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                linear.weight[:, ::16] /= 100
            for linear in (mlp.gate_proj, mlp.up_proj):
                linear.weight[:, ::16] /= 100
    return hf


def rows(hf: Any) -> torch.Tensor:
    tokens = torch.tensor([[5, 17, 3, 9, 60, 33, 2, 44, 81, 7]])
    with torch.inference_mode():
        logits: torch.Tensor = hf(tokens, use_cache=False).logits[0]
    return logits


def test_the_model_stays_the_same_and_is_rounded_better() -> None:
    exact = uneven()
    even = copy.deepcopy(exact)
    assert smooth_layers(even)
    assert not torch.equal(
        even.model.layers[0].input_layernorm.weight, exact.model.layers[0].input_layernorm.weight
    )
    wanted = rows(exact)
    assert (rows(even) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    pack_layers(even, "int8")
    coarse = copy.deepcopy(exact)
    pack_layers(coarse, "int8")
    assert (rows(even) - wanted).norm() < 0.7 * (rows(coarse) - wanted).norm()


def test_factors_are_powers_of_two_so_bfloat16_loses_nothing() -> None:
    hf = uneven().to(torch.bfloat16)
    before = hf.model.layers[1].input_layernorm.weight.clone()
    smooth_layers(hf)
    factors = before / hf.model.layers[1].input_layernorm.weight
    assert torch.equal(torch.log2(factors), torch.log2(factors).round())


@linux
def test_no_page_of_the_file_stays_in_memory(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}
    tiny("llama", dtype=torch.bfloat16, **wide).save_pretrained(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    names = {name for name, module in hf.named_modules() if isinstance(module, torch.nn.Linear)}
    linears = sum(hf.get_submodule(name).weight.nbytes for name in names)
    file = tmp_path / "model.safetensors"
    assert round_layers(hf, "int8") == len(names)
    assert resident(file) < file.stat().st_size - 0.9 * linears


def test_other_builds_are_left_alone() -> None:
    hf = tiny("gemma2")
    before = {name: value.clone() for name, value in hf.state_dict().items()}
    assert not smooth_layers(hf)
    assert all(torch.equal(value, before[name]) for name, value in hf.state_dict().items())
