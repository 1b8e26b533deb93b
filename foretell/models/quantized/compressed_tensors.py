"""compressed-tensors, as LLM Compressor writes it: each layer says by its tensors how it is packed.

Of a layer (N, K):

- numbers of b bits, half of their range above 0: `weight_packed` int32 (N, K b / 32) and perhaps
  `weight_zero_point` int32 (N b / 32, G) and `weight_g_idx` (K,);
- numbers of 8 bits: `weight` int8 (N, K) and perhaps `weight_zero_point` int8;
- floats of 8 bits: `weight` float8_e4m3fn (N, K);
- floats of 4 bits, NVFP4: `weight_packed` uint8 (N, K / 2), with `weight_scale` float8_e4m3fn
  (N, K / 16) and `weight_global_scale`, which divides it;
- floats of 4 bits, MXFP4: the same with `weight_scale` uint8 (N, K / 32) alone.

Else `weight_scale` is (N, G), (N, 1), (1,) or (), or has a number for each block. Scales of
activations are not read: activations are rounded here by the numbers that they have.
"""

from __future__ import annotations

import torch

from foretell.models.quantized.format import FLOATS, Format, Settings, floats_of
from foretell.models.quantized.fp8 import read_float8
from foretell.models.quantized.gptq import find_order
from foretell.models.quantized.matrix import (
    DOUBLED,
    KNOWN_BITS,
    Quantized,
    unpack_nibbles,
    unpack_words,
    word_count,
)
from foretell.models.quantized.mxfp4 import read_powers
from foretell.models.quantized.tensors import Tensors

QUANT_METHODS = ("compressed-tensors",)
FORMS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)
NARROW_GROUP = 16  # of NVFP4
POWER_GROUP = 32  # of MXFP4


class CompressedTensors(Format):
    """Reads matrices that compressed-tensors packed."""

    marks = ("weight_packed", "weight_scale")
    parts = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
        *("weight_g_idx", "weight_global_scale"),
    )

    def __init__(self, settings: Settings):
        settings.choice("format", FORMS, FORMS[0])
        sparsity = settings.within("sparsity_config")
        sparsity.choice("format", ("dense",), "dense")
        if settings.get("transform_config"):
            raise settings.refuse("transform_config", "left out: inputs are not turned here")
        self.groups: set[int] = set()  # inputs that share a scale
        self.blocks: tuple[int, int] | None = None
        groups = settings.within("config_groups")
        for name in groups.fields:
            weights = groups.within(name).within("weights")
            if weights.get("group_size") is not None:
                self.groups.add(weights.group("group_size"))
            if weights.get("strategy") == "block":
                self.blocks = weights.pair("block_structure")

    def read(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        shape_name = f"{path}.weight_shape"
        if shape_name in tensors:
            stated = tuple(tensors.take(shape_name).tolist())
            if stated != (outputs, inputs):
                raise LookupError(
                    f"{shape_name} is {stated}, and config.json says {outputs, inputs}"
                )
        if f"{path}.weight_packed" not in tensors:
            weight = tensors.take_sized(
                f"{path}.weight", (outputs, inputs), torch.int8, torch.float8_e4m3fn
            )
            if weight.dtype is torch.float8_e4m3fn:
                return read_float8(tensors, path, weight, "weight_scale", self.blocks)
            return self._read_bytes(tensors, path, weight)
        packed = tensors.take(f"{path}.weight_packed")
        if packed.dtype is torch.uint8:
            return self._read_floats4(tensors, path, outputs, inputs)
        return self._read_words(tensors, path, outputs, inputs)

    def _read_words(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        name = f"{path}.weight_packed"
        shape = tensors.shape(name)
        bits = next((b for b in KNOWN_BITS if (outputs, word_count(inputs, b)) == shape), 0)
        if not bits:
            raise LookupError(
                f"{name} is {shape}, which is no ({outputs}, {inputs}) of "
                f"{', '.join(map(str, KNOWN_BITS))} bits"
            )
        words = tensors.take_sized(name, shape, torch.int32)
        numbers = unpack_words(words, bits, inputs)
        group, scales = self._read_scales(tensors, path, outputs, inputs)
        zeros: torch.Tensor | int = 1 << bits - 1
        zero_name = f"{path}.weight_zero_point"
        if zero_name in tensors:
            zero_shape = word_count(outputs, bits), scales.shape[1]
            zero_words = tensors.take_sized(zero_name, zero_shape, torch.int32)
            zeros = unpack_words(zero_words.t(), bits, outputs).t()
        order = None
        if f"{path}.weight_g_idx" in tensors:
            order = find_order(tensors, f"{path}.weight_g_idx", inputs, group)
        if order is not None:
            numbers = numbers[:, order]
        return Quantized(numbers, bits, group, scales, zeros, order=order)

    def _read_bytes(self, tensors: Tensors, path: str, weight: torch.Tensor) -> Quantized:
        group, scales = self._read_scales(tensors, path, *weight.shape)
        zeros: torch.Tensor | int = 128
        zero_name = f"{path}.weight_zero_point"
        if zero_name in tensors:
            stored = tensors.take(zero_name)
            if stored.dtype is not torch.int8 or stored.numel() not in (1, scales.numel()):
                raise LookupError(f"{zero_name} is no zero point of int8 for each group")
            zeros = (_unsigned(stored.reshape(-1, 1) if stored.ndim < 2 else stored)).expand(
                scales.shape
            )
        return Quantized(_unsigned(weight), 8, group, scales, zeros)

    def _read_scales(
        self, tensors: Tensors, path: str, outputs: int, inputs: int
    ) -> tuple[int, torch.Tensor]:
        """How many inputs share a scale, and the scales (N, G)."""
        name = f"{path}.weight_scale"
        tensors.take_sized(name, tensors.shape(name), *FLOATS)
        scales = floats_of(tensors, name, tensors.shape(name))
        if scales.numel() == 1:
            return inputs, scales.reshape(1, 1).expand(outputs, 1)
        if scales.ndim == 1:
            scales = scales[:, None]
        group = inputs // max(1, scales.shape[-1])
        is_group = group == inputs or group in self.groups
        if scales.ndim != 2 or len(scales) != outputs or not is_group or inputs % group:
            raise LookupError(
                f"{name} is {tuple(scales.shape)}, which is no scale for each group of "
                f"({outputs}, {inputs}) that config.json has"
            )
        return group, scales

    def _read_floats4(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        packed = tensors.take_sized(f"{path}.weight_packed", (outputs, inputs // 2), torch.uint8)
        numbers, name = unpack_nibbles(packed), f"{path}.weight_scale"
        if f"{path}.weight_global_scale" not in tensors:
            scales = read_powers(tensors, name, (outputs, inputs // POWER_GROUP))
            return Quantized(numbers, 4, POWER_GROUP, scales, table=DOUBLED)
        shape = outputs, inputs // NARROW_GROUP
        scales = tensors.take_sized(name, shape, torch.float8_e4m3fn).float()
        divisor = floats_of(tensors, f"{path}.weight_global_scale", (1,)).float()
        scales = scales / divisor / 2
        if not bool(scales.isfinite().all()):
            raise LookupError(f"{name} and weight_global_scale give scales that are not finite")
        return Quantized(numbers, 4, NARROW_GROUP, scales, table=DOUBLED)


def _unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers from -128 on as numbers from 0 on."""
    return numbers.view(torch.uint8) ^ 128
