"""Experts in few bits: those of gpt-oss, which lie together, and those that lie apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.models.decoder.packed import weight_bytes
from foretell.models.decoder.packed_experts import PackedExperts
from tests import tiny
from tests.models.quantized import writers
from tests.models.quantized.test_formats import TEXT, read
from tests.native.machines import built

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


@torch.inference_mode()
def check(folder: Path, wanted: Any) -> None:
    ids = torch.tensor([tiny.tokenizer()(TEXT)["input_ids"]])
    theirs = wanted(ids).logits[0]
    unpacked = read(folder, torch.float32)(ids).logits[0]
    assert torch.allclose(unpacked, theirs, rtol=1e-4, atol=1e-4)
    found = read(folder)
    assert isinstance(found.model.layers[0].mlp.experts, PackedExperts)
    ours = found(ids).logits[0].float()
    distance = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert distance.median() <= 0.05, "rounding may choose another expert for a row or two"


def test_gpt_oss(tmp_path: Path) -> None:
    check(tmp_path, writers.write_gpt_oss(tmp_path))


@built
def test_the_library_computes_gpt_oss(tmp_path: Path) -> None:
    writers.write_gpt_oss(tmp_path)
    lm = foretell.load(tmp_path, exact_bits=True)
    target: Any = lm.models["target"]
    assert target.usual_backend == "native"
    tokens = lm.generate(TEXT, "plain", max_new_tokens=12).tokens
    assert lm.generate(TEXT, "suffix+token-recycling", max_new_tokens=12).tokens == tokens
    assert weight_bytes(target.hf) < 1.1 * (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "model_type, names, fields",
    [("qwen3_moe", GATE_UP_DOWN, QWEN), ("mixtral", ("w1", "w3", "w2"), MIXTRAL)],
)
@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "bitsandbytes nf4"])
def test_experts_that_lie_apart(
    name: str, model_type: str, names: Any, fields: Any, tmp_path: Path
) -> None:
    case = writers.CASES[name]
    check(tmp_path, writers.write_experts(case, tmp_path, model_type, names, **fields))
