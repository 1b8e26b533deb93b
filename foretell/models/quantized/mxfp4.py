"""MXFP4 (OCP Microscaling Formats 1.0, section 5) as gpt-oss has its experts.

The experts of a layer lie together: `gate_up_proj_blocks` uint8 (X, 2 I, E / 32, 16), whose rows
are gate and up by turns, `down_proj_blocks` (X, E, I / 32, 16), two numbers a byte, the lower one
first; and `..._scales` uint8 (X, N, K / 32), e for 2 to the power e - 127.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretell.models.quantized.format import Format, Settings
from foretell.models.quantized.matrix import DOUBLED, Quantized, unpack_nibbles
from foretell.models.quantized.tensors import Tensors

QUANT_METHODS = ("mxfp4",)
GROUP = 32
NO_NUMBER = 255  # the scale that is none


class MXFP4(Format):
    """Reads experts that lie together."""

    def __init__(self, settings: Settings):
        pass

    def stacked(
        self, tensors: Tensors, path: str, shapes: Sequence[tuple[int, int, int]]
    ) -> list[Quantized] | None:
        if f"{path}.gate_up_proj_blocks" not in tensors:
            return None
        (experts, inner, hidden), _, down_shape = shapes
        gate_up = _read(tensors, f"{path}.gate_up_proj", (experts, 2 * inner, hidden))
        down = _read(tensors, f"{path}.down_proj", down_shape)
        halves = [
            Quantized(gate_up.numbers[part::2], 4, GROUP, gate_up.scales[part::2], table=DOUBLED)
            for part in range(2)
        ]
        return [*halves, down]


def _read(tensors: Tensors, name: str, shape: tuple[int, int, int]) -> Quantized:
    """The matrices (X, N, K) of all experts as one of X N outputs."""
    experts, outputs, inputs = shape
    groups = inputs // GROUP
    blocks = tensors.take_sized(
        f"{name}_blocks", (experts, outputs, groups, GROUP // 2), torch.uint8
    )
    scales = read_powers(tensors, f"{name}_scales", (experts, outputs, groups))
    numbers = unpack_nibbles(blocks).view(experts * outputs, inputs)
    return Quantized(numbers, 4, GROUP, scales.flatten(0, 1), table=DOUBLED)


def read_powers(tensors: Tensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Reads scales that are powers of 2. Raises LookupError for what is no number."""
    scales = tensors.take_sized(name, shape, torch.uint8)
    if bool((scales == NO_NUMBER).any()):
        raise LookupError(f"{name} has scales that are no numbers")
    return scales
