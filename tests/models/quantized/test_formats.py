"""Folders in every format stand for the matrices that they were written from, packed and unpacked,
and whoever computes them does so in about the files' bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foretell
from foretell.errors import Unsupported
from foretell.models.decoder.packed import PackedLinear, weight_bytes
from foretell.models.quantized.quantized import find_settings, read_quantized
from foretell.native.packing import unpack_matrix
from tests import tiny
from tests.models.quantized import writers
from tests.native.machines import built, kernels, kinds, no_library

TEXT = "def add(a, b):"


def read(folder: Path, dtype: torch.dtype | None = None) -> Any:
    settings = find_settings(folder)
    assert settings is not None
    return read_quantized(folder, settings, dtype)


def stands_for(layer: PackedLinear) -> torch.Tensor:
    weight = unpack_matrix(layer.packed)[:, : layer.in_features].float()
    return weight if layer.order is None else weight[:, layer.order.argsort()]


@pytest.mark.parametrize("name", writers.CASES)
def test_matrices_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    case = writers.CASES[name]
    wanted = writers.write_folder(case, tmp_path)
    found, plain = read(tmp_path), read(tmp_path, torch.float32)
    modules, plain_modules = dict(found.named_modules()), dict(plain.named_modules())
    packed_bytes = weight_count = 0
    for path, stock in wanted.named_modules():
        if type(stock) is not nn.Linear:
            continue
        layer = modules[path]
        assert isinstance(layer, PackedLinear) and type(plain_modules[path]) is nn.Linear
        rounding = 2e-5 * stock.weight.detach().abs().max() if name in writers.INEXACT else 0
        assert torch.allclose(stands_for(layer), stock.weight, rtol=1e-6, atol=float(rounding))
        assert torch.allclose(plain_modules[path].weight, stock.weight, rtol=1e-6, atol=0)
        if path != "lm_head":
            packed_bytes += layer.packed.nbytes
            weight_count += stock.weight.numel()
    assert packed_bytes <= weight_count * (case.bits + 1.5) / 8
    for path, part in wanted.named_parameters():
        if "norm" in path:
            assert torch.equal(found.get_parameter(path).float(), part)


@pytest.mark.parametrize("name", writers.CASES)
@torch.inference_mode()
def test_logits_are_near_those_of_the_matrices(name: str, tmp_path: Path) -> None:
    wanted = writers.write_folder(writers.CASES[name], tmp_path)
    ids = torch.tensor([tiny.tokenizer()(TEXT)["input_ids"]])
    theirs = wanted(ids).logits[0]
    unpacked = read(tmp_path, torch.float32)(ids).logits[0]
    assert torch.allclose(unpacked, theirs, rtol=1e-4, atol=1e-4)
    ours = read(tmp_path)(ids).logits[0].float()
    assert (ours - theirs).norm() <= 0.06 * theirs.norm()
    with no_library():
        by_torch = read(tmp_path)(ids).logits[0].float()
    assert (by_torch - ours).norm() <= 0.02 * ours.norm()


@built
@pytest.mark.parametrize("name", [n for n in writers.CASES if n not in writers.UNFOLDED])
def test_the_library_computes_it_row_by_row(name: str, tmp_path: Path) -> None:
    writers.write_folder(writers.CASES[name], tmp_path)
    lm = foretell.load(tmp_path, exact_bits=True)
    target: Any = lm.models["target"]
    assert target.usual_backend == "native"
    tokens = lm.generate(TEXT, "plain", max_new_tokens=12).tokens
    assert lm.generate(TEXT, "suffix+token-recycling", max_new_tokens=12).tokens == tokens
    together = lm.generate([TEXT, "return x"], "ngram", max_new_tokens=12)
    assert together[0].tokens == tokens
    assert weight_bytes(target.hf) < 1.25 * (tmp_path / "model.safetensors").stat().st_size


@built
@pytest.mark.parametrize("name", ["bitsandbytes nf4", "fp8", "compressed-tensors nvfp4"])
def test_a_row_has_the_bits_that_it_has_alone_by_all_kernels(name: str, tmp_path: Path) -> None:
    writers.write_folder(writers.CASES[name], tmp_path)
    layer = read(tmp_path).model.layers[0].mlp.down_proj
    x = torch.randn(9, layer.in_features)
    alone = torch.cat([layer(row[None]) for row in x])
    for kind in kinds():
        with kernels(kind):
            assert torch.equal(layer(x), alone), kind


@built
@pytest.mark.parametrize("name", writers.UNFOLDED)
def test_inputs_in_an_order_of_their_own_are_gathered_by_torch(name: str, tmp_path: Path) -> None:
    writers.write_folder(writers.CASES[name], tmp_path)
    with pytest.raises(Unsupported, match="has inputs in another order"):
        foretell.load(tmp_path, backend="native")
    lm = foretell.load(tmp_path, backend="torch")
    assert len(lm.generate(TEXT, "plain", max_new_tokens=4).tokens) == 4
