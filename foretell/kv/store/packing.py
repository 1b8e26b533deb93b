"""Numbers in a few bits each: codes in whole bytes, and the grids that numbers are rounded to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (1, 2, 4, 8)  # of a code: those that fill bytes


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes from 0 to 2 ** bits - 1 (..., n) in bytes, uint8 (..., ceil(n * bits / 8))."""
    each = 8 // bits
    codes = codes.to(torch.uint8)
    lacking = -codes.shape[-1] % each
    if lacking:
        codes = torch.nn.functional.pad(codes, (0, lacking))
    groups = codes.unflatten(-1, (-1, each))
    packed = groups[..., 0]
    for place in range(1, each):
        packed = packed | groups[..., place] << (place * bits)
    return packed.contiguous()


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes, uint8 (..., count), of each row of bytes."""
    if bits == 8:
        return packed[..., :count]
    parts = [packed >> place & (1 << bits) - 1 for place in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)[..., :count]


@dataclass(frozen=True)
class Rounded:
    """Numbers (..., n) rounded to a grid of their own in each group of neighbours.

    `codes`: packed, uint8 (..., n * bits / 8); `low`, `step`: of each group (..., n / group).
    """

    codes: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor

    def numbers(self, bits: int, count: int) -> torch.Tensor:
        """The rounded numbers (..., count), in float32 or wider."""
        wide = torch.promote_types(self.low.dtype, torch.float32)
        codes = unpack(self.codes, bits, count).unflatten(-1, (self.low.shape[-1], -1))
        return torch.addcmul(
            self.low.to(wide)[..., None], codes, self.step.to(wide)[..., None]
        ).flatten(-2)


def rounded(
    numbers: torch.Tensor, bits: int, group: int, counted: torch.Tensor | None = None
) -> Rounded:
    """These numbers (..., n) on a grid of 2 ** bits values in each group of `group` neighbours,
    from the least to the largest number of those that are `counted` (bool, as numbers; None: all).

    Lowest values and steps have the numbers' own type; a counted number is at most half a step from
    its rounded one, and a group of equal numbers is kept as it is.
    """
    levels = 2**bits - 1
    wide = torch.promote_types(numbers.dtype, torch.float32)
    groups = numbers.unflatten(-1, (-1, group))
    if counted is None:
        low, high = groups.aminmax(dim=-1)
    else:
        left = counted.unflatten(-1, (-1, group))
        low = groups.masked_fill(~left, torch.inf).amin(-1)
        high = groups.masked_fill(~left, -torch.inf).amax(-1)
        none = low > high
        low, high = low.masked_fill(none, 0), high.masked_fill(none, 0)
    # Rounded up, so that the largest number lies on the grid.
    eps = torch.finfo(numbers.dtype).eps
    step = ((high.to(wide) - low.to(wide)) / levels * (1 + eps)).to(numbers.dtype)
    apart = groups.to(wide) - low.to(wide)[..., None]
    codes = apart / step.to(wide).clamp(min=torch.finfo(wide).tiny)[..., None]
    codes = codes.round().clamp(0, levels).flatten(-2)
    return Rounded(pack(codes, bits), low, step)


def divisor(count: int, most: int) -> int:
    """The largest number up to `most` that divides `count`."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)
