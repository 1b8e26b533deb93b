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
        """Raises ValueError where it holds other numbers than its sizes say."""
        cells = self.blocks * BLOCK * self.inputs
        size = cells // 2 if self.format == "int4" else cells * (1 + (self.format == "bfloat16"))
        shape = (self.blocks, self.inputs // GROUP, BLOCK)
        has_scales = self.format != "bfloat16"
        fits = [
            self.inputs % GROUP == 0 and self.outputs > 0,
            self.weights.dtype is torch.uint8 and self.weights.shape == (size,),
            (self.scales is not None) == has_scales,
            self.minima is None or self.format == "int4",
        ]
        for part in (self.scales, self.minima):
            fits.append(part is None or (part.dtype is torch.float16 and part.shape == shape))
        if not all(fits):
            what = f"{self.format} matrix ({self.outputs}, {self.inputs})"
            raise ValueError(f"a {what} has weights {tuple(self.weights.shape)} or other scales")

    def split(self, sizes: list[int]) -> list[Packed]:
        """Matrices of so many outputs each, which share this one's memory; multiples of 16."""
        parts = []
        block = 0
        row_bytes = len(self.weights) // self.blocks
        for size in sizes:
            assert size % BLOCK == 0, "blocks of outputs cannot be divided"
            end = block + size // BLOCK
            weights = self.weights[block * row_bytes : end * row_bytes]
            part = Packed(self.format, size, self.inputs, weights)
            if self.scales is not None:
                part.scales = self.scales[block:end]
            if self.minima is not None:
                part.minima = self.minima[block:end]
            parts.append(part)
            block = end
        return parts

    def take(self, outputs: torch.Tensor) -> Packed:
        """The matrix of these outputs (n,) alone, in their order."""
        missing = -len(outputs) % BLOCK
        padded = F.pad(outputs, (0, missing), value=int(outputs[-1]))
        block, place = padded // BLOCK, padded % BLOCK
        # In every format 4 bytes of each output lie beside those of the next one.
        lanes = self.weights.view(self.blocks, -1, BLOCK, 4)[block, :, place]
        weights = lanes.unflatten(0, (-1, BLOCK)).transpose(1, 2).reshape(-1)
        taken = Packed(self.format, len(outputs), self.inputs, weights)
        if self.scales is not None:
            taken.scales = _lanes(self.scales[block, :, place])
        if self.minima is not None:
            taken.minima = _lanes(self.minima[block, :, place])
        return taken

    @staticmethod
    def join(parts: list[Packed]) -> Packed:
        """One matrix for several with the same inputs; all but the last have multiples of 16."""
        assert all(part.outputs % BLOCK == 0 for part in parts[:-1])
        first = parts[0]
        joined = Packed(
            first.format,
            sum(part.outputs for part in parts),
            first.inputs,
            torch.cat([part.weights for part in parts]),
        )
        if first.scales is not None:
            joined.scales = torch.cat([part.scales for part in parts if part.scales is not None])
        if first.minima is not None:
            joined.minima = torch.cat([part.minima for part in parts if part.minima is not None])
        return joined


# --- numbers of a matrix


def best_peaks(groups: torch.Tensor) -> torch.Tensor:
    """Of each group (N, G, 32) the peak among PEAKS with the least squared error, uint8 (N, G).

    The library's `peaks` is quicker. Weights that were of 4 bits before stand on a few steps, which
    some peak nearly meets: for those it is a third of what 127 gives.
    """
    top = groups.abs().amax(-1)
    best, least = torch.full_like(top, PEAKS[0]), torch.full_like(top, torch.inf)
    for peak in PEAKS:
        exact = groups * (peak / top.clamp_min(TINY))[..., None]
        error = (exact.round() - exact).square().sum(-1) * (top / peak).square()
        better = error < least
        best = torch.where(better, float(peak), best)
        least = torch.where(better, error, least)
    return best.to(torch.uint8)


def best_ranges(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each group (N, G, 32) the numbers of 4 bits, uint8 (N, G, 32), with the scale and the
    least value, float32 (N, G), that are nearest to it.

    The numbers are those of the best among parts of the group's range; scale and least value fit
    them by least squares. The library's `ranges` is quicker.
    """
    least, most = groups.amin(-1), groups.amax(-1)
    middle, mean = (least + most) / 2, groups.mean(-1)
    centered = groups - mean[..., None]
    best: list[torch.Tensor] = []
    for share in SHARES:
        low = middle + (least - middle) * share
        step = ((most - least) * (share / 15)).clamp_min(TINY)
        numbers = ((groups - low[..., None]) / step[..., None]).round_().clamp_(0, 15)
        center = numbers.mean(-1)
        spread = numbers.square().sum(-1) - GROUP * center.square()
        scale = (numbers * centered).sum(-1) / spread.clamp_min(1 / GROUP)
        off = (numbers - center[..., None]) * scale[..., None] - centered
        found = [numbers, scale, mean - scale * center, off.square().sum(-1)]
        if not best:
            best = found
            continue
        better = found[-1] < best[-1]
        best[0] = torch.where(better[..., None], found[0], best[0])
        for i in range(1, len(best)):
            best[i] = torch.where(better, found[i], best[i])
    return best[0].to(torch.uint8), best[1], best[2]


def quantize(
    weight: torch.Tensor, format: str, peaks: Peaks = best_peaks, ranges: Ranges = best_ranges
) -> Packed:
    """Packs a matrix (outputs, inputs) of floats, rounded to the format.

    `peaks`: what chooses the largest number of each group of 8 bits; `ranges`: what finds the
    numbers of 4 bits.
    """
    if missing := -weight.shape[1] % GROUP:
        weight = F.pad(weight, (0, missing))
    if format == "bfloat16":
        return pack_bfloat16(weight.to(torch.bfloat16))
    step = max(BLOCK, CHUNK // weight.shape[1] // BLOCK * BLOCK)
    parts = []
    for rows in weight.split(step):
        groups = rows.float().view(len(rows), -1, GROUP)
        found = _numbers8(groups, peaks) if format == "int8" else _numbers4(groups, ranges)
        parts.append(pack(format, *found))
    return parts[0] if len(parts) == 1 else Packed.join(parts)


def _numbers8(groups: torch.Tensor, peaks: Peaks) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The largest of each group (N, G, 32) becomes its peak or less that."""
    scale = (groups.abs().amax(-1) / peaks(groups)).half()
    wide = scale.float().clamp_min(1e-30)[..., None]
    numbers = (groups / wide).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scale, None


def _numbers4(
    groups: torch.Tensor, ranges: Ranges
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers, scale, least = ranges(groups)
    return numbers, scale.half(), least.half()


# --- their places


def pack(
    format: str, numbers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None
) -> Packed:
    """Whole numbers (N, G, 32), scales and minima (N, G) as the library reads them.

    Numbers of int8 are signed; those of int4 are 0 to 15.
    """
    outputs, groups, _ = numbers.shape
    missing = -outputs % BLOCK
    if missing:
        numbers = F.pad(numbers, (0, 0, 0, 0, 0, missing))
    if format == "int8":
        blocks = numbers.view(-1, BLOCK, groups * 8, 4).transpose(1, 2)
        weights = (blocks.to(torch.int16) + 128).to(torch.uint8)
    else:
        # (block, output, group, half, four, input) -> (block, group, four, output, input)
        parts = numbers.view(-1, BLOCK, groups, 2, 4, 4).permute(3, 0, 2, 4, 1, 5)
        weights = parts[0] | parts[1] << 4
    packed = Packed(format, outputs, groups * GROUP, weights.reshape(-1))
    packed.scales = _beside(scales, missing)
    packed.minima = None if minima is None else _beside(minima, missing)
    return packed


def _beside(values: torch.Tensor, missing: int) -> torch.Tensor:
    """(N, G) -> (blocks, G, 16)."""
    padded = F.pad(values.half(), (0, 0, 0, missing))
    return padded.view(-1, BLOCK, values.shape[1]).transpose(1, 2).contiguous()


def _lanes(values: torch.Tensor) -> torch.Tensor:
    """(N, G), N a multiple of 16 -> (blocks, G, 16)."""
    return values.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def pack_bfloat16(weight: torch.Tensor) -> Packed:
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, 0, 0, -outputs % BLOCK))
    pairs = padded.view(-1, BLOCK, inputs // 2, 2).transpose(1, 2).contiguous()
    return Packed("bfloat16", outputs, inputs, pairs.view(torch.uint8).reshape(-1))


def numbers(packed: Packed) -> torch.Tensor:
    """The whole numbers (N, G, 32) of a packed matrix: int8 signed, int4 from 0 to 15."""
    groups = packed.inputs // GROUP
    if packed.format == "int8":
        blocks = packed.weights.view(-1, groups * 8, BLOCK, 4).transpose(1, 2)
        whole = (blocks.to(torch.int16) - 128).to(torch.int8)
    else:
        pairs = packed.weights.view(-1, groups, 4, BLOCK, 4)
        halves = torch.stack([pairs & 15, pairs >> 4])
        whole = halves.permute(1, 4, 2, 0, 3, 5)
    return whole.reshape(-1, groups, GROUP)[: packed.outputs]


def by_group(packed: Packed, values: torch.Tensor) -> torch.Tensor:
    """Scales or minima (blocks, G, 16) as (N, G), float16."""
    groups = packed.inputs // GROUP
    return values.transpose(1, 2).reshape(-1, groups)[: packed.outputs]


def unpack(packed: Packed) -> torch.Tensor:
    """The matrix (N, inputs): bfloat16 as it was, else float32."""
    if packed.format == "bfloat16":
        pairs = packed.weights.view(torch.bfloat16).view(-1, packed.inputs // 2, BLOCK, 2)
        return pairs.transpose(1, 2).reshape(-1, packed.inputs)[: packed.outputs]
    assert packed.scales is not None
    scale = by_group(packed, packed.scales).float()[..., None]
    whole = numbers(packed).float()
    if packed.format == "int8":
        return (whole * scale).flatten(1)
    if packed.minima is None:
        return ((whole - 8) * scale).flatten(1)
    return (whole * scale + by_group(packed, packed.minima).float()[..., None]).flatten(1)
