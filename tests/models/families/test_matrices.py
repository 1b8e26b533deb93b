"""Modules that multiply by a matrix, whichever way their weights lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from foretell.models.decoder.packed import PackedLinear, pack_layers
from foretell.models.families.matrices import as_linear, is_matrix
from tests.models.decoder.families import described


def test_turned_weights_are_a_linear_layer_of_the_same_memory() -> None:
    turned = Conv1D(48, 32)
    nn.init.normal_(turned.bias)
    linear, x = as_linear(turned), torch.randn(5, 32)
    assert (linear.in_features, linear.out_features) == (32, 48)
    torch.testing.assert_close(linear(x), turned(x))
    assert linear.weight.data_ptr() == turned.weight.data_ptr()
    plain = nn.Linear(4, 4)
    assert as_linear(plain) is plain


def test_modules_that_do_something_else_are_none() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert is_matrix(nn.Linear(2, 2)) and is_matrix(Conv1D(2, 2))
    assert not is_matrix(Doubled(2, 2)) and not is_matrix(nn.Embedding(2, 2))


@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_both_kinds_are_packed_alike(format: str) -> None:
    hf = described("gpt2")
    stock = hf.transformer.h[0].attn.c_attn
    wanted = PackedLinear.of(as_linear(stock), format)
    assert pack_layers(hf, format) == 3 * 4 + 1  # four of each layer, and the head
    packed = hf.transformer.h[0].attn.c_attn
    assert torch.equal(packed.packed.weights, wanted.packed.weights)
    x = torch.randn(7, stock.nx)
    with torch.inference_mode():
        ours, theirs = packed(x), stock(x)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.15
