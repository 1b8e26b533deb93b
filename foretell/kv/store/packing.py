"""Numbers in a few bits each: codes in whole bytes, and the grids that numbers are rounded to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (1, 2, 4, 8)  # of a code: those that fill bytes


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes from 0 to 2 ** bits - 1 (..., n) in bytes, uint8 (..., ceil(n * bits / 8))."""
    codes_per_byte = 8 // bits
    codes = codes.to(torch.uint8)
    missing_codes = -codes.shape[-1] % codes_per_byte
    if missing_codes:
        codes = torch.nn.functional.pad(codes, (0, missing_codes))
    byte_groups = codes.unflatten(-1, (-1, codes_per_byte))
    packed = byte_groups[..., 0]
    for code_index in range(1, codes_per_byte):
        packed = packed | byte_groups[..., code_index] << (code_index * bits)
    return packed.contiguous()


def unpack_codes(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes, uint8 (..., count), of each row of bytes."""
    if bits == 8:
        return packed[..., :count]
    shifted_parts = [packed >> bit_shift & (1 << bits) - 1 for bit_shift in range(0, 8, bits)]
    return torch.stack(shifted_parts, -1).flatten(-2)[..., :count]


@dataclass(frozen=True)
class Rounded:
    """Numbers (..., n) rounded to a grid of their own in each group of neighbours.

    `codes`: packed, uint8 (..., n * bits / 8); `low`, `step`: of each group (..., n / group).
    """

    codes: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor

    def restore_numbers(self, bits: int, count: int) -> torch.Tensor:
        """The rounded numbers (..., count), in float32 or wider."""
        wide_type = torch.promote_types(self.low.dtype, torch.float32)
        codes = unpack_codes(self.codes, bits, count).unflatten(-1, (self.low.shape[-1], -1))
        return torch.addcmul(
            self.low.to(wide_type)[..., None], codes, self.step.to(wide_type)[..., None]
        ).flatten(-2)


def round_to_grid(
    numbers: torch.Tensor, bits: int, group: int, counted_mask: torch.Tensor | None = None
) -> Rounded:
    """Rounds numbers (..., n) to a grid of 2 ** bits values in each group of `group` neighbours,
    from the least to the largest number of those in `counted_mask` (bool, as numbers; None: all).

    Lowest values and steps have the numbers' own type; a counted number is at most half a step from
    its rounded one, and a group of equal numbers is kept as it is.
    """
    levels = 2**bits - 1
    wide_type = torch.promote_types(numbers.dtype, torch.float32)
    groups = numbers.unflatten(-1, (-1, group))
    if counted_mask is None:
        group_minimum, group_maximum = groups.aminmax(dim=-1)
    else:
        counted_groups = counted_mask.unflatten(-1, (-1, group))
        group_minimum = groups.masked_fill(~counted_groups, torch.inf).amin(-1)
        group_maximum = groups.masked_fill(~counted_groups, -torch.inf).amax(-1)
        empty_groups = group_minimum > group_maximum
        group_minimum, group_maximum = (
            group_minimum.masked_fill(empty_groups, 0),
            group_maximum.masked_fill(empty_groups, 0),
        )
    # Rounded up, so that the largest number lies on the grid.
    eps = torch.finfo(numbers.dtype).eps
    grid_step = (
        (group_maximum.to(wide_type) - group_minimum.to(wide_type)) / levels * (1 + eps)
    ).to(numbers.dtype)
    grid_offsets = groups.to(wide_type) - group_minimum.to(wide_type)[..., None]
    codes = grid_offsets / grid_step.to(wide_type).clamp(min=torch.finfo(wide_type).tiny)[..., None]
    codes = codes.round().clamp(0, levels).flatten(-2)
    return Rounded(pack_codes(codes, bits), group_minimum, grid_step)


def largest_divisor(count: int, max_size: int) -> int:
    """The largest number up to `max_size` that divides `count`."""
    return next(size for size in range(min(count, max_size), 0, -1) if count % size == 0)
