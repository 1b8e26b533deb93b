"""Floats of 8 bits, e4m3, with scales of blocks, rows or the whole matrix.

A matrix is `weight` float8_e4m3fn (N, K) with `weight_scale_inv` or `weight_scale`, which it is
multiplied by: (N / 128, K / 128) for blocks of `weight_block_size`, as DeepSeek-V3 has them
(arXiv 2412.19437, section 3.3), or (N, 1), (1,) or ().
"""

from __future__ import annotations

import torch

from foretell.models.quantized.format import Format, Settings, floats_of
from foretell.models.quantized.matrix import Floats8, Quantized
from foretell.models.quantized.tensors import Tensors

QUANT_METHODS = ("fp8", "fbgemm_fp8")
SCALES = ("weight_scale_inv", "weight_scale")


class FP8(Format):
    """Reads matrices of floats of 8 bits."""

    marks = SCALES
    parts = ("weight", *SCALES)

    def __init__(self, settings: Settings):
        self.blocks = None
        if settings.get("weight_block_size") is not None:
            self.blocks = settings.pair("weight_block_size")

    def read(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        weight = tensors.take_sized(f"{path}.weight", (outputs, inputs), torch.float8_e4m3fn)
        scale = next(name for name in SCALES if f"{path}.{name}" in tensors)
        return read_float8(tensors, path, weight, scale, self.blocks)


def read_float8(
    tensors: Tensors,
    path: str,
    weight: torch.Tensor,
    scale_name: str,
    blocks: tuple[int, int] | None,
) -> Quantized:
    """Reads the scales of a matrix (N, K) of floats of 8 bits."""
    outputs, inputs = weight.shape
    name = f"{path}.{scale_name}"
    numbers = weight.view(torch.uint8)
    if bool((numbers & 127 == 127).any()):
        raise LookupError(f"{path}.weight has numbers that are none")
    shape = tensors.shape(name)
    scales = floats_of(tensors, name, shape).float()
    if scales.numel() == 1:
        return Floats8(numbers, 8, inputs, scales.reshape(1, 1).expand(outputs, 1))
    if shape in ((outputs,), (outputs, 1)):
        return Floats8(numbers, 8, inputs, scales.reshape(outputs, 1))
    high, wide = blocks or (outputs, inputs)
    if shape != (-(-outputs // high), -(-inputs // wide)):
        raise LookupError(
            f"{name} is {shape}, which is no scale for each block of {high, wide} of "
            f"{outputs, inputs}"
        )
    return Floats8(numbers, 8, wide, scales.repeat_interleave(high, 0)[:outputs])
