"""bitsandbytes: numbers of 4 bits by a table (Dettmers et al. 2023, arXiv 2305.14314), or of 8.

In 4 bits a matrix (N, K) is `weight` uint8 (N K / 2, 1), two numbers a byte, the upper one first;
`weight.quant_map` float32 (16,), the table; `weight.absmax`, the scale of each block of numbers;
and `weight.quant_state.bitsandbytes__nf4`, or `__fp4`, the text of a JSON object, in bytes. Scales
that are uint8 stand for nested_quant_map[scale] * nested_absmax + nested_offset. In 8 bits it is
`weight` int8 (N, K) with `SCB` float32 (N,), the largest number of each row.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.models.quantized.format import Format, Settings, floats_of
from foretell.models.quantized.matrix import Quantized, unpack_nibbles
from foretell.models.quantized.tensors import Tensors
from foretell.ops.parsing import parse_json

QUANT_METHODS = ("bitsandbytes",)
STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
LONGEST_STATE = 1 << 16  # bytes


class BitsAndBytes(Format):
    """Reads matrices that bitsandbytes packed."""

    marks = ("SCB", "weight.absmax")
    parts = (
        *("weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map"),
        *("weight.nested_absmax", "weight.nested_quant_map", *(f"{STATE}{kind}" for kind in KINDS)),
    )

    def __init__(self, settings: Settings):
        pass

    def read(self, tensors: Tensors, path: str, outputs: int, inputs: int) -> Quantized:
        if f"{path}.SCB" in tensors:
            weight = tensors.take_sized(f"{path}.weight", (outputs, inputs), torch.int8)
            peaks = floats_of(tensors, f"{path}.SCB", (outputs,)).float()
            tensors.skip(f"{path}.weight_format")
            return Quantized(weight.view(torch.uint8) ^ 128, 8, inputs, peaks[:, None] / 127, 128)
        state_name = next((n for n in (f"{path}.{STATE}{k}" for k in KINDS) if n in tensors), None)
        if state_name is None:
            raise LookupError(f"it lacks {path}.{STATE}{KINDS[0]}")
        state = _read_state(tensors, state_name)
        if state.get("shape") != [outputs, inputs]:
            raise LookupError(
                f"{state_name} says {state.get('shape')}, and config.json {outputs, inputs}"
            )
        size = _count(state, "blocksize", state_name)
        if inputs % size:
            raise LookupError(
                f"{path} has {inputs} inputs, and its blocks of {size} go on in the next row"
            )
        packed = tensors.take_sized(f"{path}.weight", (outputs * inputs // 2, 1), torch.uint8)
        table = floats_of(tensors, f"{path}.weight.quant_map", (16,)).float()
        numbers = unpack_nibbles(packed[:, 0], is_low_first=False).view(outputs, inputs)
        scales = _read_scales(
            tensors, f"{path}.weight", outputs * inputs // size, state, state_name
        )
        return Quantized(
            numbers, 4, size, scales.view(outputs, inputs // size), table=table.tolist()
        )


def _read_state(tensors: Tensors, name: str) -> dict[str, Any]:
    shape = tensors.shape(name)
    if len(shape) == 1 and 0 < shape[0] <= LONGEST_STATE:
        try:
            state = parse_json(bytes(tensors.take_sized(name, shape, torch.uint8).tolist()))
            if isinstance(state, dict):
                return state
        except ValueError:
            pass
    raise LookupError(f"{name} is no JSON object")


def _count(state: dict[str, Any], field: str, state_name: str) -> int:
    value = state.get(field)
    if type(value) is not int or value < 1:
        raise LookupError(f"{state_name} has {field}={value!r}, which is no number of inputs")
    return value


def _read_scales(
    tensors: Tensors, name: str, count: int, state: dict[str, Any], state_name: str
) -> torch.Tensor:
    """The scale of each block, float32 (count,)."""
    stored = tensors.take_sized(f"{name}.absmax", (count,), torch.uint8, torch.float32)
    if stored.dtype is torch.float32:
        return stored
    size = _count(state, "nested_blocksize", state_name)
    offset = state.get("nested_offset")
    if not isinstance(offset, float):
        raise LookupError(f"{state_name} has nested_offset={offset!r}, which is no number")
    table = floats_of(tensors, f"{name}.nested_quant_map", (256,)).float()
    peaks = floats_of(tensors, f"{name}.nested_absmax", (-(-count // size),)).float()
    scales = table[stored.long()] * peaks.repeat_interleave(size)[:count] + offset
    if not bool(scales.isfinite().all()):
        raise LookupError(f"{name}.absmax gives scales that are not finite")
    return scales
