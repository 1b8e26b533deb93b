"""Stores rows in a few bits, with the largest numbers as they are and a matrix of low rank beside.

Of each key channel, over time, and of each value, over its channels, a share of the largest and
smallest numbers is kept as it is. The others are rounded to `bits` in groups, keys along tokens and
values along channels. What rounding has lost is approximated by two thin matrices for every head.
A prompt is stored when it is read; behind it every `buffer` tokens are, and until then they stay as
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
from typing import TYPE_CHECKING

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV
from foretell.kv.store.base import Code, LayerForm, Rows, Stored
from foretell.kv.store.packing import BITS, Rounded, divisor, rounded

if TYPE_CHECKING:
    from foretell.core.model import Model

SEGMENT = 255  # neighbours whose places are counted in one byte


@dataclass(frozen=True)
class Gear(KV):
    """Counts of bits, numbers and tokens, and a share."""

    role = "encoder"

    bits: int = 4  # of a rounded number: 1, 2, 4 or 8
    group: int = 64  # numbers on one grid, at most
    outliers: float = 0.02  # share of numbers that are kept, half of them the largest ones
    rank: int = 4  # of the matrices of a prompt; 0: none
    later: int = 2  # of those of tokens behind it
    loops: int = 3  # of the power iteration that finds them
    buffer: int = 64  # tokens that are stored together

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise BadConfig.field("gear:bits", self.bits, "1, 2, 4 or 8")
        if not 0 <= self.outliers <= 1:
            raise BadConfig.field("gear:outliers", self.outliers, "a share from 0 to 1")
        least = {"group": 1, "rank": 0, "later": 0, "loops": 1, "buffer": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value < smallest:
                raise BadConfig.field(f"gear:{name}", value, f"at least {smallest}")

    def policy(self, target: Model) -> Stored:
        self.fits(target)
        return Stored(0, 0, self.buffer, form=Recipe(self))


@dataclass(frozen=True)
class Recipe(LayerForm):
    """Keys are taken as (KV, D, n), so that both are rounded along their last dimension; values
    are of (n, KV * D), as a token's largest numbers are those of all its heads.
    """

    set: Gear

    batched = True

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, place: int
    ) -> Code:
        heads, count, width = values.shape
        by_channel = keys.transpose(1, 2).reshape(-1, count)
        by_token = values.transpose(0, 1).reshape(count, -1)
        rank = self.set.later if place else self.set.rank
        seed = (place << 20) + 2 * layer
        coded: dict[str, torch.Tensor] = {}
        for name, numbers, group in (
            ("k", by_channel, divisor(self.set.buffer, self.set.group)),
            ("v", by_token, divisor(width, self.set.group)),
        ):
            kept = extremes(numbers, self.set.outliers)
            counted = None
            if kept.shape[1]:
                counted = torch.ones_like(numbers, dtype=torch.bool).scatter_(1, kept, False)
            grid = rounded(numbers, self.set.bits, group, counted)
            lost = numbers - grid.numbers(self.set.bits, numbers.shape[1])
            lost = lost.scatter(1, kept, 0)
            by_head = lost.view(heads, -1, count) if name == "k" else lost.view(count, heads, -1)
            by_head = by_head.transpose(1, 2) if name == "k" else by_head.transpose(0, 1)
            left, right = thin(by_head, rank, self.set.loops, seed + (name == "v"), numbers.dtype)
            low, counts = in_segments(kept, numbers.shape[1])
            coded |= {
                f"{name}.codes": grid.codes,
                f"{name}.low": grid.low,
                f"{name}.step": grid.step,
                f"{name}.kept": numbers.gather(1, kept),
                f"{name}.places": low,
                f"{name}.counts": counts,
                f"{name}.left": left,
                f"{name}.right": right,
            }
        return coded

    def decode_layer(self, code: Code) -> Rows:
        *stacked, heads, count, _ = code["k.left"].shape
        width, wide = code["k.right"].shape[-2], code["v.right"].shape[-2]
        keys = self._numbers(code, "k", count).view(*stacked, heads, width, count)
        values = self._numbers(code, "v", heads * wide).view(*stacked, count, heads, wide)
        return keys.transpose(-1, -2), values.transpose(-3, -2)

    def _numbers(self, code: Code, name: str, count: int) -> torch.Tensor:
        """All vectors (..., vectors, count) that were rounded."""
        grid = Rounded(*(code[f"{name}.{part}"] for part in ("codes", "low", "step")))
        numbers = grid.numbers(self.set.bits, count)
        left, right = (code[f"{name}.{part}"].to(numbers) for part in ("left", "right"))
        if left.shape[-1]:
            lost = left @ right.transpose(-1, -2)  # (..., KV, n, D)
            lost = lost.transpose(-1, -2) if name == "k" else lost.transpose(-3, -2)
            numbers = numbers + lost.reshape(numbers.shape)
        kept = code[f"{name}.kept"]
        places = from_segments(code[f"{name}.places"], code[f"{name}.counts"])
        return numbers.to(kept.dtype).scatter(-1, places, kept)


def extremes(numbers: torch.Tensor, share: float) -> torch.Tensor:
    """The places (vectors, m), in order, of each vector's largest and smallest numbers, half of
    `share` each.
    """
    count = numbers.shape[1]
    half = int(share * count / 2 + 0.5)
    order = numbers.argsort(dim=1, stable=True)
    kept = torch.cat([order[:, :half], order[:, max(half, count - half) :]], 1)
    return kept.sort(1).values


def in_segments(places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (vectors, m), in order, of up to `count`, in a byte each: where they stand in their
    segment, and how many of each vector stand in each segment (vectors, segments), if not in one.
    """
    if count <= SEGMENT:
        return places.to(torch.uint8), places.new_zeros(len(places), 0, dtype=torch.uint8)
    segments = torch.arange(-(-count // SEGMENT), device=places.device)
    counts = (places[:, None] // SEGMENT == segments[:, None]).sum(2)
    return (places % SEGMENT).to(torch.uint8), counts.to(torch.uint8)


def from_segments(low: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The places again."""
    if not counts.shape[-1]:
        return low.long()
    starts = torch.arange(counts.shape[-1], device=low.device).mul_(SEGMENT).expand(counts.shape)
    high = starts.flatten().repeat_interleave(counts.flatten().long())
    return high.view(low.shape) + low


def thin(
    lost: torch.Tensor, rank: int, loops: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices for every head, (KV, n, r) and (KV, D, r), whose product is near to what was
    lost (KV, n, D), by power iteration (Algorithm 2). Zeros where it is not.
    """
    heads, count, width = lost.shape
    rank = min(rank, count, width)
    random = torch.Generator().manual_seed(seed)
    right = torch.rand(heads, width, rank, generator=random, dtype=torch.float64).to(lost)
    left = lost.new_zeros(heads, count, rank)
    for loop in range(loops if rank else 0):
        if loop == loops - 1:
            right = torch.linalg.qr(right).Q
        left = lost @ right
        if loop == loops - 1:
            left = torch.linalg.qr(left).Q
        right = lost.transpose(1, 2) @ left
    left, right = left.to(dtype), right.to(dtype)
    beside = (lost - left.to(lost) @ right.to(lost).transpose(1, 2)).norm(dim=(1, 2))
    nearer = (beside < lost.norm(dim=(1, 2)))[:, None, None]
    # What is no number, where squares overflowed, is not nearer either.
    return left.where(nearer, 0).contiguous(), right.where(nearer, 0).contiguous()
