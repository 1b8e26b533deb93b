"""Matrices of .gguf files as the C library reads them: it puts their numbers into its own order and
rounds none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from foretell.native import library
from foretell.native.arena import Arena, rounded_size
from foretell.native.packing import BLOCK, FLOATS, GROUP, SCALE_DTYPES, SUPER, Packed

BENT = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # floats of 4 bits, twice each


@dataclass(frozen=True)
class BlockType:
    """A type of numbers in a file: its own number there, numbers of a block, and its bytes."""

    number: int
    block: int
    block_bytes: int
    format: str = "whole"
    bits: int = 0
    group: int = 0
    offset: int = 0
    scaling: str = "none"
    least_scaling: str = "none"
    table: tuple[int, ...] = ()


TYPES = {
    "F32": BlockType(0, 1, 4, "float32"),
    "F16": BlockType(1, 1, 2, "float16"),
    "BF16": BlockType(30, 1, 2, "bfloat16"),
    "Q8_0": BlockType(8, 32, 34, "whole", 8, 32, 128, "half"),
    "Q4_0": BlockType(2, 32, 18, "whole", 4, 32, 8, "half"),
    "Q4_1": BlockType(3, 32, 20, "whole", 4, 32, 0, "half", "half"),
    "Q5_0": BlockType(6, 32, 22, "whole", 5, 32, 16, "half"),
    "Q5_1": BlockType(7, 32, 24, "whole", 5, 32, 0, "half", "half"),
    "Q2_K": BlockType(10, 256, 84, "whole", 2, 16, 0, "super", "super"),
    "Q3_K": BlockType(11, 256, 110, "whole", 3, 16, 4, "super"),
    "Q4_K": BlockType(12, 256, 144, "whole", 4, 32, 0, "super", "super"),
    "Q5_K": BlockType(13, 256, 176, "whole", 5, 32, 0, "super", "super"),
    "Q6_K": BlockType(14, 256, 210, "whole", 6, 16, 32, "super"),
    "IQ4_NL": BlockType(20, 32, 18, "whole", 4, 32, 0, "half", table=BENT),
    "IQ4_XS": BlockType(23, 256, 136, "whole", 4, 32, 0, "super", table=BENT),
    "TQ1_0": BlockType(34, 256, 54, "whole", 2, 256, 1, "half"),
    "TQ2_0": BlockType(35, 256, 66, "whole", 2, 256, 1, "half"),
    "MXFP4": BlockType(39, 32, 17, "whole", 4, 32, 0, "power", table=DOUBLED),
    "NVFP4": BlockType(40, 64, 36, "whole", 4, 16, 0, "float8", table=DOUBLED),
}


def pack_blocks(
    type_name: str,
    rows: np.ndarray,
    inputs: int,
    order: torch.Tensor | None = None,
    arena: Arena | None = None,
) -> Packed:
    """Packs a matrix from a file's rows, uint8 (N, bytes), of one of TYPES.

    `inputs`: numbers of a row; where these are no multiple of 32, which only floats can be, the
    matrix has zeros behind them. `order`: the row that each output is, int64. `arena`: where its
    numbers are put while there is room. Raises ValueError for rows of another size, and IndexError
    for a row that there is not.
    """
    block_type = TYPES[type_name]
    row_bytes = inputs // block_type.block * block_type.block_bytes
    if rows.dtype != np.uint8 or rows.shape != (len(rows), row_bytes) or inputs % block_type.block:
        raise ValueError(
            f"rows {rows.shape} of {rows.dtype} are none of {inputs} numbers of {type_name}"
        )
    output_count = len(rows) if order is None else len(order)
    packed = _empty_matrix(block_type, output_count, inputs, arena)
    contiguous_rows = np.ascontiguousarray(rows)
    raw = library.Raw(
        type=block_type.number,
        inputs=inputs,
        row_count=len(rows),
        rows=contiguous_rows.ctypes.data,
        row_bytes=row_bytes,
    )
    if order is not None:
        raw.order = library.checked_address(order, (packed.outputs,), torch.int64)
    matrix = library.describe_matrix(packed)
    library.load_kernels().ft_pack(raw, matrix, library.thread_count())
    return packed


def packed_sizes(type_name: str, outputs: int, inputs: int) -> dict[str, int]:
    """The bytes that such a matrix takes up in each room of an arena."""
    shapes = _matrix_shapes(TYPES[type_name], outputs, inputs)
    return {
        room: 0 if shape is None else rounded_size(math.prod(shape) * dtype.itemsize)
        for room, (shape, dtype) in shapes.items()
    }


def _matrix_shapes(
    block_type: BlockType, outputs: int, inputs: int
) -> dict[str, tuple[tuple[int, ...] | None, torch.dtype]]:
    """Shape and number format of each field of a matrix of this type; None: it has none."""
    blocks, padded_inputs = -(-outputs // BLOCK), -(-inputs // GROUP) * GROUP
    is_whole = block_type.format == "whole"
    bits = block_type.bits if is_whole else 8 * FLOATS[block_type.format].itemsize

    def scale_shape(scaling: str) -> tuple[tuple[int, ...] | None, torch.dtype]:
        if scaling == "none":
            return None, torch.uint8
        if scaling == "super":
            record_bytes = (2 + SUPER // block_type.group) * BLOCK
            return (blocks, inputs // SUPER, record_bytes), torch.uint8
        dtype = SCALE_DTYPES.get(scaling, torch.uint8)
        return (blocks, inputs // block_type.group, BLOCK), dtype

    return {
        "weights": ((blocks * BLOCK * padded_inputs * bits // 8,), torch.uint8),
        "scales": scale_shape(block_type.scaling),
        "minima": scale_shape(block_type.least_scaling),
    }


def _empty_matrix(
    block_type: BlockType, outputs: int, inputs: int, arena: Arena | None = None
) -> Packed:
    """A matrix of this type with memory for its numbers."""

    def find_memory(
        room: str, shape: tuple[int, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        if shape is None:
            return None
        memory = None
        if arena is not None:
            memory = arena.take(room, math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype) if memory is None else memory.view(dtype).view(shape)

    shapes = _matrix_shapes(block_type, outputs, inputs)
    memory = {room: find_memory(room, *shape) for room, shape in shapes.items()}
    weights = memory["weights"]
    assert weights is not None
    return Packed(
        block_type.format,
        outputs,
        -(-inputs // GROUP) * GROUP,
        weights,
        memory["scales"],
        memory["minima"],
        block_type.bits,
        block_type.group,
        block_type.offset,
        block_type.scaling,
        block_type.least_scaling,
        torch.tensor(block_type.table, dtype=torch.int8) if block_type.table else None,
    )
