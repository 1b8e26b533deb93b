"""How matrices lie in memory for the C library, and how their numbers are found.

16 outputs lie beside each other: for whole numbers a vector of 64 bytes holds 4 inputs of each,
for bfloat16 2 inputs of each. Numbers of 8 and 4 bits stand in groups of 32 inputs with a scale
each, of 4 bits also with a least value each, as in the formats Q8_0, Q4_0 and Q4_1 of .gguf files:

    int8      w = scale * n, n from -127 to 127, stored with 128 added
    int4      w = scale * n + least, n from 0 to 15; without `minima` w = scale * (n - 8)
    bfloat16  as it is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 16  # outputs beside each other
GROUP = 32  # inputs that share a scale
PEAKS = range(127, 95, -1)  # what the largest number of a group of 8 bits may be
TINY = 1e-36  # weights no larger count as zero
Peaks = Callable[[torch.Tensor], torch.Tensor]
Ranges = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
FORMATS = ("int8", "int4", "bfloat16")  # in the order of the library's numbers
CHUNK = 1 << 20  # weights that are quantized at a time
SHARES = [1 - 0.02 * i for i in range(16)]  # of a group's range, tried for 4 bits


@dataclass
class Packed:
    """A matrix (outputs, inputs) as the library reads it.

    `weights` uint8, flat; `scales` and `minima` float16 (blocks, groups, 16), None where the format
    has none. `inputs` is a multiple of 32: what it exceeds the matrix by is zero.
    """

    format: str
    outputs: int
    inputs: int
    weights: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None

    @property
    def blocks(self) -> int:
        return -(-self.outputs // BLOCK)

    @property
    def nbytes(self) -> int:
        parts = (self.weights, self.scales, self.minima)
        return sum(part.nbytes for part in parts if part is not None)

    def check(self) -> None:
        """Raises ValueError where the matrix holds other numbers than its sizes say."""
        cell_count = self.blocks * BLOCK * self.inputs
        weight_bytes = (
            cell_count // 2
            if self.format == "int4"
            else cell_count * (1 + (self.format == "bfloat16"))
        )
        scale_shape = (self.blocks, self.inputs // GROUP, BLOCK)
        has_scales = self.format != "bfloat16"
        conditions = [
            self.inputs % GROUP == 0 and self.outputs > 0,
            self.weights.dtype is torch.uint8 and self.weights.shape == (weight_bytes,),
            (self.scales is not None) == has_scales,
            self.minima is None or self.format == "int4",
        ]
        for part in (self.scales, self.minima):
            conditions.append(
                part is None or (part.dtype is torch.float16 and part.shape == scale_shape)
            )
        if not all(conditions):
            matrix_name = f"{self.format} matrix ({self.outputs}, {self.inputs})"
            raise ValueError(
                f"a {matrix_name} has weights {tuple(self.weights.shape)} or other scales"
            )

    def split(self, sizes: list[int]) -> list[Packed]:
        """Splits into matrices of so many outputs each, which share this one's memory; multiples of
        16.
        """
        split_parts = []
        block_start = 0
        row_bytes = len(self.weights) // self.blocks
        for size in sizes:
            assert size % BLOCK == 0, "blocks of outputs cannot be divided"
            block_end = block_start + size // BLOCK
            weights = self.weights[block_start * row_bytes : block_end * row_bytes]
            split_part = Packed(self.format, size, self.inputs, weights)
            if self.scales is not None:
                split_part.scales = self.scales[block_start:block_end]
            if self.minima is not None:
                split_part.minima = self.minima[block_start:block_end]
            split_parts.append(split_part)
            block_start = block_end
        return split_parts

    def take(self, outputs: torch.Tensor) -> Packed:
        """Returns the matrix of these outputs (n,) alone, in their order."""
        missing_outputs = -len(outputs) % BLOCK
        padded_outputs = F.pad(outputs, (0, missing_outputs), value=int(outputs[-1]))
        block_numbers, block_positions = padded_outputs // BLOCK, padded_outputs % BLOCK
        # In every format 4 bytes of each output lie beside those of the next one.
        output_lanes = self.weights.view(self.blocks, -1, BLOCK, 4)[
            block_numbers, :, block_positions
        ]
        weights = output_lanes.unflatten(0, (-1, BLOCK)).transpose(1, 2).reshape(-1)
        taken_matrix = Packed(self.format, len(outputs), self.inputs, weights)
        if self.scales is not None:
            taken_matrix.scales = _block_lanes(self.scales[block_numbers, :, block_positions])
        if self.minima is not None:
            taken_matrix.minima = _block_lanes(self.minima[block_numbers, :, block_positions])
        return taken_matrix

    @staticmethod
    def join(parts: list[Packed]) -> Packed:
        """Joins several with the same inputs into one; all but the last have multiples of 16."""
        assert all(part.outputs % BLOCK == 0 for part in parts[:-1])
        first_part = parts[0]
        joined_matrix = Packed(
            first_part.format,
            sum(part.outputs for part in parts),
            first_part.inputs,
            torch.cat([part.weights for part in parts]),
        )
        if first_part.scales is not None:
            joined_matrix.scales = torch.cat(
                [part.scales for part in parts if part.scales is not None]
            )
        if first_part.minima is not None:
            joined_matrix.minima = torch.cat(
                [part.minima for part in parts if part.minima is not None]
            )
        return joined_matrix


# --- numbers of a matrix


def best_peaks(groups: torch.Tensor) -> torch.Tensor:
    """Chooses for each group (N, G, 32) the peak among PEAKS with the least squared error, uint8
    (N, G).

    The library's `find_peaks` is quicker. Weights that were of 4 bits before stand on a few steps,
    which some peak nearly meets: for those it is a third of what 127 gives.
    """
    group_maxima = groups.abs().amax(-1)
    best_values, least_errors = (
        torch.full_like(group_maxima, PEAKS[0]),
        torch.full_like(group_maxima, torch.inf),
    )
    for peak in PEAKS:
        scaled_groups = groups * (peak / group_maxima.clamp_min(TINY))[..., None]
        error = (scaled_groups.round() - scaled_groups).square().sum(-1) * (
            group_maxima / peak
        ).square()
        is_better = error < least_errors
        best_values = torch.where(is_better, float(peak), best_values)
        least_errors = torch.where(is_better, error, least_errors)
    return best_values.to(torch.uint8)


def best_ranges(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fits to each group (N, G, 32) numbers of 4 bits, uint8 (N, G, 32), with the scale and the
    least value, float32 (N, G), that are nearest to it.

    The numbers are those of the best among parts of the group's range; scale and least value fit
    them by least squares. The library's `find_ranges` is quicker.
    """
    group_minima, group_maxima = groups.amin(-1), groups.amax(-1)
    range_middle, group_means = (group_minima + group_maxima) / 2, groups.mean(-1)
    centered = groups - group_means[..., None]
    best_fit: list[torch.Tensor] = []
    for share in SHARES:
        share_minimum = range_middle + (group_minima - range_middle) * share
        number_step = ((group_maxima - group_minima) * (share / 15)).clamp_min(TINY)
        numbers = (
            ((groups - share_minimum[..., None]) / number_step[..., None]).round_().clamp_(0, 15)
        )
        center = numbers.mean(-1)
        spread = numbers.square().sum(-1) - GROUP * center.square()
        scale = (numbers * centered).sum(-1) / spread.clamp_min(1 / GROUP)
        residuals = (numbers - center[..., None]) * scale[..., None] - centered
        share_fit = [numbers, scale, group_means - scale * center, residuals.square().sum(-1)]
        if not best_fit:
            best_fit = share_fit
            continue
        is_better = share_fit[-1] < best_fit[-1]
        best_fit[0] = torch.where(is_better[..., None], share_fit[0], best_fit[0])
        for fit_index in range(1, len(best_fit)):
            best_fit[fit_index] = torch.where(is_better, share_fit[fit_index], best_fit[fit_index])
    return best_fit[0].to(torch.uint8), best_fit[1], best_fit[2]


def quantize_matrix(
    weight: torch.Tensor, format: str, peaks: Peaks = best_peaks, ranges: Ranges = best_ranges
) -> Packed:
    """Packs a matrix (outputs, inputs) of floats, rounded to the format.

    `peaks`: chooses the largest number of each group of 8 bits; `ranges`: finds the numbers of 4
    bits.
    """
    if missing_inputs := -weight.shape[1] % GROUP:
        weight = F.pad(weight, (0, missing_inputs))
    if format == "bfloat16":
        return pack_bfloat16(weight.to(torch.bfloat16))
    rows_per_chunk = max(BLOCK, CHUNK // weight.shape[1] // BLOCK * BLOCK)
    packed_parts = []
    for chunk_rows in weight.split(rows_per_chunk):
        groups = chunk_rows.float().view(len(chunk_rows), -1, GROUP)
        quantized_parts = (
            _quantize_int8(groups, peaks) if format == "int8" else _quantize_int4(groups, ranges)
        )
        packed_parts.append(pack_numbers(format, *quantized_parts))
    return packed_parts[0] if len(packed_parts) == 1 else Packed.join(packed_parts)


def _quantize_int8(groups: torch.Tensor, peaks: Peaks) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Rounds groups (N, G, 32); the largest number of each becomes its peak or less that."""
    scale = (groups.abs().amax(-1) / peaks(groups)).half()
    safe_scale = scale.float().clamp_min(1e-30)[..., None]
    numbers = (groups / safe_scale).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scale, None


def _quantize_int4(
    groups: torch.Tensor, ranges: Ranges
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers, scale, group_minima = ranges(groups)
    return numbers, scale.half(), group_minima.half()


# --- their places


def pack_numbers(
    format: str, numbers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None
) -> Packed:
    """Packs whole numbers (N, G, 32), scales and minima (N, G) as the library reads them.

    Numbers of int8 are signed; those of int4 are 0 to 15.
    """
    outputs, groups, _ = numbers.shape
    missing_outputs = -outputs % BLOCK
    if missing_outputs:
        numbers = F.pad(numbers, (0, 0, 0, 0, 0, missing_outputs))
    if format == "int8":
        output_blocks = numbers.view(-1, BLOCK, groups * 8, 4).transpose(1, 2)
        weights = (output_blocks.to(torch.int16) + 128).to(torch.uint8)
    else:
        # (block, output, group, half, four, input) -> (block, group, four, output, input)
        nibble_parts = numbers.view(-1, BLOCK, groups, 2, 4, 4).permute(3, 0, 2, 4, 1, 5)
        weights = nibble_parts[0] | nibble_parts[1] << 4
    packed_matrix = Packed(format, outputs, groups * GROUP, weights.reshape(-1))
    packed_matrix.scales = _interleave_blocks(scales, missing_outputs)
    packed_matrix.minima = None if minima is None else _interleave_blocks(minima, missing_outputs)
    return packed_matrix


def _interleave_blocks(values: torch.Tensor, missing_outputs: int) -> torch.Tensor:
    """Lays (N, G) out as (blocks, G, 16)."""
    padded_values = F.pad(values.half(), (0, 0, 0, missing_outputs))
    return padded_values.view(-1, BLOCK, values.shape[1]).transpose(1, 2).contiguous()


def _block_lanes(values: torch.Tensor) -> torch.Tensor:
    """Lays (N, G), N a multiple of 16, out as (blocks, G, 16)."""
    return values.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def pack_bfloat16(weight: torch.Tensor) -> Packed:
    outputs, inputs = weight.shape
    padded_weight = F.pad(weight, (0, 0, 0, -outputs % BLOCK))
    pairs = padded_weight.view(-1, BLOCK, inputs // 2, 2).transpose(1, 2).contiguous()
    return Packed("bfloat16", outputs, inputs, pairs.view(torch.uint8).reshape(-1))


def unpack_numbers(packed: Packed) -> torch.Tensor:
    """Unpacks the whole numbers (N, G, 32) of a packed matrix: int8 signed, int4 from 0 to 15."""
    group_count = packed.inputs // GROUP
    if packed.format == "int8":
        output_blocks = packed.weights.view(-1, group_count * 8, BLOCK, 4).transpose(1, 2)
        unpacked_numbers = (output_blocks.to(torch.int16) - 128).to(torch.int8)
    else:
        byte_pairs = packed.weights.view(-1, group_count, 4, BLOCK, 4)
        halves = torch.stack([byte_pairs & 15, byte_pairs >> 4])
        unpacked_numbers = halves.permute(1, 4, 2, 0, 3, 5)
    return unpacked_numbers.reshape(-1, group_count, GROUP)[: packed.outputs]


def group_values(packed: Packed, values: torch.Tensor) -> torch.Tensor:
    """Returns scales or minima (blocks, G, 16) as (N, G), float16."""
    group_count = packed.inputs // GROUP
    return values.transpose(1, 2).reshape(-1, group_count)[: packed.outputs]


def unpack_matrix(packed: Packed) -> torch.Tensor:
    """Unpacks the matrix (N, inputs): bfloat16 as it was, else float32."""
    if packed.format == "bfloat16":
        pairs = packed.weights.view(torch.bfloat16).view(-1, packed.inputs // 2, BLOCK, 2)
        return pairs.transpose(1, 2).reshape(-1, packed.inputs)[: packed.outputs]
    assert packed.scales is not None
    group_scale = group_values(packed, packed.scales).float()[..., None]
    unpacked_numbers = unpack_numbers(packed).float()
    if packed.format == "int8":
        return (unpacked_numbers * group_scale).flatten(1)
    if packed.minima is None:
        return ((unpacked_numbers - 8) * group_scale).flatten(1)
    return (
        unpacked_numbers * group_scale + group_values(packed, packed.minima).float()[..., None]
    ).flatten(1)
