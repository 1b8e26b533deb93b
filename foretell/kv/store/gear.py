"""Stores rows in a few bits, with the largest numbers as they are and a matrix of low rank beside.

Of each key channel, over time, and of each value, over its channels, a share of the largest and
smallest numbers is kept as it is. The others are rounded to `bits` in groups, keys along tokens and
values along channels. What rounding has lost is approximated by two thin matrices for every head.
A prompt is stored when it is read; after it every `buffer` tokens are, and until then they stay as
they are.

Paper: Kang et al., GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative
Inference of LLM, arXiv:2403.05527
Guarantee: lossy: rows are rounded; with drafts the text is the one without them
Cost: target 1, and decoding what is stored; a number of a row takes `bits`, 32 / `group` for its
grid, about 0.5 for numbers kept as they are (at 2 %), and 16 `rank` (1 / D + 1 / n) of n rows
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- numbers that are kept stand exactly as they were; the published code adds the matrices to them
- their count is that of the numbers of the head's channel, or of the token over all its heads
- grids have 2^bits values; the published code's are right for 2 and 4 bits alone
- a group is as wide as divides a head's width, and equal numbers make no grid
- where the matrices would bring a head no nearer to its rows they are left out
- they begin with random numbers that the layer and the place in the text decide
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

from foretell.core.settings import OneOf, Range
from foretell.kv.base import KV
from foretell.kv.store.base import Code, LayerForm, Rows, Stored
from foretell.kv.store.packing import BITS, Rounded, largest_divisor, round_to_grid

if TYPE_CHECKING:
    from foretell.core.model import Model

SEGMENT = 255  # neighbours whose places are counted in one byte


@dataclass(frozen=True)
class Gear(KV):
    """Counts of bits, numbers and tokens, and a share."""

    role = "encoder"

    bits: Annotated[int, OneOf(BITS)] = 4  # of a rounded number: 1, 2, 4 or 8
    group: Annotated[int, Range(1)] = 64  # numbers on one grid, at most
    # share of numbers that are kept, half of them the largest ones
    outliers: Annotated[float, Range(0, 1)] = 0.02
    rank: Annotated[int, Range(0)] = 4  # of the matrices of a prompt; 0: none
    later: Annotated[int, Range(0)] = 2  # of those of tokens after it
    loops: Annotated[int, Range(1)] = 3  # of the power iteration that finds them
    buffer: Annotated[int, Range(1)] = 64  # tokens that are stored together

    def build_policy(self, target: Model) -> Stored:
        self.check_target(target)
        return Stored(0, 0, self.buffer, form=Recipe(self))


@dataclass(frozen=True)
class Recipe(LayerForm):
    """Keys are taken as (KV, D, n), so that both are rounded along their last dimension; values
    are of (n, KV * D), as a token's largest numbers are those of all its heads.
    """

    settings: Gear

    batched = True

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, stored_count: int
    ) -> Code:
        heads, count, width = values.shape
        by_channel = keys.transpose(1, 2).reshape(-1, count)
        by_token = values.transpose(0, 1).reshape(count, -1)
        rank = self.settings.later if stored_count else self.settings.rank
        seed = (stored_count << 20) + 2 * layer
        coded: dict[str, torch.Tensor] = {}
        for name, numbers, group in (
            ("k", by_channel, largest_divisor(self.settings.buffer, self.settings.group)),
            ("v", by_token, largest_divisor(width, self.settings.group)),
        ):
            outlier_places = extreme_places(numbers, self.settings.outliers)
            counted_mask = None
            if outlier_places.shape[1]:
                counted_mask = torch.ones_like(numbers, dtype=torch.bool).scatter_(
                    1, outlier_places, False
                )
            grid = round_to_grid(numbers, self.settings.bits, group, counted_mask)
            rounding_loss = numbers - grid.restore_numbers(self.settings.bits, numbers.shape[1])
            rounding_loss = rounding_loss.scatter(1, outlier_places, 0)
            by_head = (
                rounding_loss.view(heads, -1, count)
                if name == "k"
                else rounding_loss.view(count, heads, -1)
            )
            by_head = by_head.transpose(1, 2) if name == "k" else by_head.transpose(0, 1)
            left_matrix, right_matrix = thin_matrices(
                by_head, rank, self.settings.loops, seed + (name == "v"), numbers.dtype
            )
            segment_places, segment_counts = in_segments(outlier_places, numbers.shape[1])
            coded |= {
                f"{name}.codes": grid.codes,
                f"{name}.low": grid.low,
                f"{name}.step": grid.step,
                f"{name}.kept": numbers.gather(1, outlier_places),
                f"{name}.places": segment_places,
                f"{name}.counts": segment_counts,
                f"{name}.left": left_matrix,
                f"{name}.right": right_matrix,
            }
        return coded

    def decode_layer(self, code: Code) -> Rows:
        *stacked, heads, row_count, _ = code["k.left"].shape
        key_width, value_width = code["k.right"].shape[-2], code["v.right"].shape[-2]
        keys = self._restore_numbers(code, "k", row_count).view(
            *stacked, heads, key_width, row_count
        )
        values = self._restore_numbers(code, "v", heads * value_width).view(
            *stacked, row_count, heads, value_width
        )
        return keys.transpose(-1, -2), values.transpose(-3, -2)

    def _restore_numbers(self, code: Code, name: str, count: int) -> torch.Tensor:
        """All vectors (..., vectors, count) that were rounded."""
        grid = Rounded(*(code[f"{name}.{part}"] for part in ("codes", "low", "step")))
        numbers = grid.restore_numbers(self.settings.bits, count)
        left_matrix, right_matrix = (
            code[f"{name}.{part}"].to(numbers) for part in ("left", "right")
        )
        if left_matrix.shape[-1]:
            rounding_loss = left_matrix @ right_matrix.transpose(-1, -2)  # (..., KV, n, D)
            rounding_loss = (
                rounding_loss.transpose(-1, -2) if name == "k" else rounding_loss.transpose(-3, -2)
            )
            numbers = numbers + rounding_loss.reshape(numbers.shape)
        outlier_numbers = code[f"{name}.kept"]
        outlier_places = from_segments(code[f"{name}.places"], code[f"{name}.counts"])
        return numbers.to(outlier_numbers.dtype).scatter(-1, outlier_places, outlier_numbers)


def extreme_places(numbers: torch.Tensor, share: float) -> torch.Tensor:
    """The places (vectors, m), in order, of each vector's largest and smallest numbers, half of
    `share` each.
    """
    count = numbers.shape[1]
    half_count = int(share * count / 2 + 0.5)
    number_order = numbers.argsort(dim=1, stable=True)
    outlier_places = torch.cat(
        [number_order[:, :half_count], number_order[:, max(half_count, count - half_count) :]], 1
    )
    return outlier_places.sort(1).values


def in_segments(places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (vectors, m), in order, of up to `count`, in a byte each: where they stand in their
    segment, and how many of each vector stand in each segment (vectors, segments), if not in one.
    """
    if count <= SEGMENT:
        return places.to(torch.uint8), places.new_zeros(len(places), 0, dtype=torch.uint8)
    segments = torch.arange(-(-count // SEGMENT), device=places.device)
    counts = (places[:, None] // SEGMENT == segments[:, None]).sum(2)
    return (places % SEGMENT).to(torch.uint8), counts.to(torch.uint8)


def from_segments(segment_places: torch.Tensor, segment_counts: torch.Tensor) -> torch.Tensor:
    """The places again."""
    if not segment_counts.shape[-1]:
        return segment_places.long()
    all_starts = (
        torch.arange(segment_counts.shape[-1], device=segment_places.device)
        .mul_(SEGMENT)
        .expand(segment_counts.shape)
    )
    segment_starts = all_starts.flatten().repeat_interleave(segment_counts.flatten().long())
    return segment_starts.view(segment_places.shape) + segment_places


def thin_matrices(
    rounding_loss: torch.Tensor, rank: int, loops: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices for every head, (KV, n, r) and (KV, D, r), whose product is near to what was
    lost (KV, n, D), by power iteration (Algorithm 2). Zeros where it is not.
    """
    heads, count, width = rounding_loss.shape
    rank = min(rank, count, width)
    generator = torch.Generator().manual_seed(seed)
    right_matrix = torch.rand(heads, width, rank, generator=generator, dtype=torch.float64).to(
        rounding_loss
    )
    left_matrix = rounding_loss.new_zeros(heads, count, rank)
    for loop in range(loops if rank else 0):
        if loop == loops - 1:
            right_matrix = torch.linalg.qr(right_matrix).Q
        left_matrix = rounding_loss @ right_matrix
        if loop == loops - 1:
            left_matrix = torch.linalg.qr(left_matrix).Q
        right_matrix = rounding_loss.transpose(1, 2) @ left_matrix
    left_matrix, right_matrix = left_matrix.to(dtype), right_matrix.to(dtype)
    remaining_loss = (
        rounding_loss
        - left_matrix.to(rounding_loss) @ right_matrix.to(rounding_loss).transpose(1, 2)
    ).norm(dim=(1, 2))
    is_nearer = (remaining_loss < rounding_loss.norm(dim=(1, 2)))[:, None, None]
    # What is no number, where squares overflowed, is not nearer either.
    return left_matrix.where(is_nearer, 0).contiguous(), right_matrix.where(
        is_nearer, 0
    ).contiguous()
