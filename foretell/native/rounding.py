"""How the numbers of a matrix of floats are found: 8 or 4 bits in groups of 32, or floats."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from foretell.native.packing import BLOCK, FLOATS, GROUP, Packed, pack_floats, pack_whole

PEAKS = range(127, 95, -1)  # what the largest number of a group of 8 bits may be
TINY = 1e-36  # weights no larger count as zero
DTYPES = ("int8", "int4", "bfloat16")  # to which the layers of a model are rounded
CHUNK = 1 << 20  # weights that are quantized at a time
SHARES = [1 - 0.02 * i for i in range(16)]  # of a group's range, tried for 4 bits
Peaks = Callable[[torch.Tensor], torch.Tensor]
Ranges = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


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
    weight: torch.Tensor, dtype: str, peaks: Peaks = best_peaks, ranges: Ranges = best_ranges
) -> Packed:
    """Packs a matrix (outputs, inputs) of floats, rounded to one of DTYPES or of FLOATS. Raises
    ValueError for another format.

    `peaks`: chooses the largest number of each group of 8 bits; `ranges`: finds the numbers of 4
    bits.
    """
    if missing_inputs := -weight.shape[1] % GROUP:
        weight = F.pad(weight, (0, missing_inputs))
    if dtype in FLOATS:
        return pack_floats(weight.to(FLOATS[dtype]))
    if dtype not in DTYPES:
        raise ValueError(f"matrices are packed as int8, int4 or floats, not as {dtype!r}")
    rows_per_chunk = max(BLOCK, CHUNK // weight.shape[1] // BLOCK * BLOCK)
    packed_parts = []
    for chunk_rows in weight.split(rows_per_chunk):
        groups = chunk_rows.float().view(len(chunk_rows), -1, GROUP)
        packed_parts.append(
            _quantize_int8(groups, peaks) if dtype == "int8" else _quantize_int4(groups, ranges)
        )
    return packed_parts[0] if len(packed_parts) == 1 else Packed.join(packed_parts)


def _quantize_int8(groups: torch.Tensor, peaks: Peaks) -> Packed:
    """Rounds groups (N, G, 32); the largest number of each becomes its peak or less that."""
    scale = (groups.abs().amax(-1) / peaks(groups)).half()
    safe_scale = scale.float().clamp_min(1e-30)[..., None]
    numbers = (groups / safe_scale).round_().clamp_(-127, 127).to(torch.int8)
    return pack_whole(numbers.view(torch.uint8).flatten(1) ^ 128, 8, GROUP, scale, offset=128)


def _quantize_int4(groups: torch.Tensor, ranges: Ranges) -> Packed:
    numbers, scale, group_minima = ranges(groups)
    return pack_whole(numbers.flatten(1), 4, GROUP, scale.half(), group_minima.half())
