"""Random weights in every number format of .gguf files, as blocks that are drawn again and again.

Noise of a normal law is rounded once into a tile of blocks; a matrix of any size is filled with
blocks of its tile in random order. So its weights have the variance that was asked for, no two of
its rows are alike, and filling takes as long as copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import numpy as np

TILE = 1 << 20  # numbers of a tile
CHUNK = 1 << 24  # bytes of a piece of a matrix
SUPER = 256  # numbers of a block of the K formats
UNIT = 128  # numbers at least that stay together: few and short copies take longest
Format = gguf.GGMLQuantizationType


def noise_tile(number_format: Format, deviation: float, draw: np.random.Generator) -> np.ndarray:
    """Units (N, bytes) of blocks of numbers with this standard deviation."""
    numbers = draw.standard_normal(TILE, np.float32) * np.float32(deviation)
    block_length, block_bytes = gguf.GGML_QUANT_SIZES[number_format]
    unit_length = max(UNIT, block_length)
    round_blocks = ROUNDED.get(number_format)
    if round_blocks is None:
        tile = gguf.quantize(numbers.reshape(-1, unit_length), number_format)
    else:
        tile = round_blocks(numbers.reshape(-1, SUPER))
    unit_bytes = unit_length // block_length * block_bytes
    return np.ascontiguousarray(tile).view(np.uint8).reshape(-1, unit_bytes)


def matrix_pieces(
    tile: np.ndarray, byte_count: int, draw: np.random.Generator
) -> Iterator[np.ndarray]:
    """The bytes of a matrix, in pieces of at most CHUNK: units of the tile in random order."""
    unit_bytes = tile.shape[1]
    units = tile.reshape(-1).view(f"V{unit_bytes}")
    most = CHUNK // unit_bytes
    while byte_count:
        count = min(-(-byte_count // unit_bytes), most)
        piece = units.take(draw.integers(0, len(units), count, dtype=np.int32))
        yield piece.view(np.uint8)[:byte_count]
        byte_count -= min(byte_count, piece.nbytes)


# --- the K formats, which the package gguf reads and does not write


def _group_ranges(numbers: np.ndarray, highest: int) -> tuple[np.ndarray, ...]:
    """Whole numbers (N, 8, 32) from 0 to `highest`, the 6-bit scales and least values (N, 8) of
    their groups, and the scales (N) of each of these.
    """
    groups = numbers.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    steps, minima = (groups.max(-1) - least) / highest, -least
    step_unit, least_unit = (
        np.maximum(part.max(-1) / 63, 1e-7).astype(np.float16) for part in (steps, minima)
    )
    step_counts, least_counts = (
        np.clip(np.rint(part / unit[:, None].astype(np.float32)), 0, 63).astype(np.uint8)
        for part, unit in ((steps, step_unit), (minima, least_unit))
    )
    step = step_unit[:, None].astype(np.float32) * np.maximum(step_counts, 1)
    lowest = least_unit[:, None].astype(np.float32) * least_counts
    whole = np.clip(np.rint((groups + lowest[..., None]) / step[..., None]), 0, highest)
    return whole.astype(np.uint8), np.maximum(step_counts, 1), least_counts, step_unit, least_unit


def _packed_scales(steps: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Scales and least values of 6 bits (N, 8 each) in 12 bytes: those of groups 4 to 7 are split
    into four bits of their own and the two highest bits of the bytes of groups 0 to 3.
    """
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (steps, minima)]
    return np.concatenate([*first, (steps[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], -1)


def _halves(whole: np.ndarray) -> np.ndarray:
    """Numbers of 4 bits (N, 8, 32) in 128 bytes: two neighbouring groups share theirs."""
    return (whole[:, 0::2] & 15 | (whole[:, 1::2] & 15) << 4).reshape(len(whole), 128)


def _as_bytes(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts], -1
    )


def _round_q4_k(numbers: np.ndarray) -> np.ndarray:
    whole, steps, minima, step_unit, least_unit = _group_ranges(numbers, 15)
    return _as_bytes(step_unit, least_unit, _packed_scales(steps, minima), _halves(whole))


def _round_q5_k(numbers: np.ndarray) -> np.ndarray:
    whole, steps, minima, step_unit, least_unit = _group_ranges(numbers, 31)
    fifth = np.bitwise_or.reduce((whole >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return _as_bytes(step_unit, least_unit, _packed_scales(steps, minima), fifth, _halves(whole))


def _round_q6_k(numbers: np.ndarray) -> np.ndarray:
    groups = numbers.reshape(-1, 16, 16)
    steps = np.abs(groups).max(-1) / 31
    unit = np.maximum(steps.max(-1) / 127, 1e-7).astype(np.float16)
    counts = np.clip(np.rint(steps / unit[:, None].astype(np.float32)), 1, 127).astype(np.int8)
    step = unit[:, None].astype(np.float32) * counts
    whole = np.clip(np.rint(groups / step[..., None]), -32, 31) + 32
    # Of each half of a block: quarters of 32 numbers, whose low bits pair the first two quarters
    # with the last two, and whose high bits lie in one byte.
    quarters = whole.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> 4) << shifts, axis=2)
    return _as_bytes(low, high, counts, unit)


ROUNDED: dict[Format, Callable[[np.ndarray], np.ndarray]] = {
    Format.Q4_K: _round_q4_k,
    Format.Q5_K: _round_q5_k,
    Format.Q6_K: _round_q6_k,
}
