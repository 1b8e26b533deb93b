"""Stores keys in a few bits, blocks of channels with one exponent each.

Of `block` neighbouring channels of a key the largest number decides an exponent, one byte, and
every channel has a mantissa of `bits` after it. With `sort`, channels of like size share blocks,
so that a few large ones coarsen their own block alone: the pairs of channels that positions rotate
are ordered by their size in the rows that are stored, for every head. A prompt is stored when it is
read; after it every `buffer` tokens are, and until then they stay as they are.

Paper: Trukhanov and Soloveychik, Accurate Block Quantization in LLMs with Outliers,
arXiv:2403.20137
Guarantee: lossy: keys are rounded; with drafts the text is the one without them
Cost: target 1, and decoding what is stored; a number of a key takes `bits` + 8 / `block`
Needs: cache rows of every layer, of all of the text; with `sort`, rotary positions
Trains: nothing
Differs:
- the paper sorts rows of the key weights by their norms, once; here rotated keys themselves are
measured, so that weights stay as they are and any backend's keys serve
- how the paper rounds is not known to us: to the nearest mantissa, of equal ones the even
- a block is as wide as divides a head's width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

from foretell.core.settings import OneOf, Range
from foretell.kv.base import KV
from foretell.kv.slots import Turn, find_turn
from foretell.kv.store.base import Code, LayerForm, Rows, Stored
from foretell.kv.store.packing import largest_divisor, pack_codes, unpack_codes

if TYPE_CHECKING:
    from foretell.core.model import Model

BITS = (2, 4, 8)
SMALLEST, LARGEST = -100, 127  # exponents of two
MOVES = (1, 300, 40_000)  # positions; one of them turns any pair that is turned at all


@dataclass(frozen=True)
class BlockQuantization(KV):
    """Counts of bits, channels and tokens."""

    role = "encoder"

    bits: Annotated[int, OneOf(BITS)] = 4  # of a mantissa, its sign included: 2, 4 or 8
    block: Annotated[int, Range(1)] = 32  # channels that share an exponent, at most
    sort: bool = False  # whether channels of like size share blocks
    buffer: Annotated[int, Range(1)] = 64  # tokens that are stored together

    def build_policy(self, target: Model) -> Stored:
        self.check_target(target)
        widths = tuple(shape[1] for shape in target.layout if shape is not None)
        partners = None
        if self.sort:
            turn = find_turn(self.name, target)
            partners = {width: channel_partners(turn, width, target.device) for width in {*widths}}
        return Stored(0, 0, self.buffer, form=Blocks(self.bits, self.block, widths, partners))


@dataclass(frozen=True)
class Blocks(LayerForm):
    """`widths`: of each layer's keys. `partners`: of each channel of keys so wide, the one that
    positions mix it with (D,); None: channels are not sorted.
    """

    bits: int
    block: int
    widths: tuple[int, ...]
    partners: dict[int, torch.Tensor] | None = None

    batched = True

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, stored_count: int
    ) -> Code:
        code = {"values": values.clone()}
        width = keys.shape[2]
        if self.partners is not None:
            channel_order = order_by_size(keys, self.partners[width])
            code["order"] = channel_order.to(torch.uint8 if width <= 256 else torch.int16)
            keys = keys.gather(2, channel_order[:, None].expand_as(keys))
        code["codes"], code["exponents"] = encode_blocks(
            keys, self.bits, largest_divisor(width, self.block)
        )
        return code

    def decode_rows(self, code: Code, layer: int) -> Rows:
        values = code["values"]
        wide_type = torch.promote_types(values.dtype, torch.float32)
        keys = decode_blocks(
            code["codes"], code["exponents"], self.bits, self.widths[layer], wide_type
        )
        if "order" in code:
            channel_places = code["order"].long().argsort(-1)
            keys = keys.gather(-1, channel_places[..., None, :].expand_as(keys))
        return keys.to(values.dtype), values


def encode_blocks(
    numbers: torch.Tensor, bits: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers (..., D) as packed mantissas, uint8 (..., D * bits / 8), and an exponent for each
    block, int8 (..., D / block).
    """
    blocks = numbers.unflatten(-1, (-1, block))
    wide_blocks = blocks.to(torch.promote_types(numbers.dtype, torch.float32))
    exponents = (
        wide_blocks.abs().amax(-1).frexp().exponent - 1
    )  # of the largest number, rounded down
    exponents = exponents.clamp(SMALLEST, LARGEST)
    half_range = 1 << bits - 1
    codes = (
        (wide_blocks / mantissa_steps(exponents, bits, wide_blocks.dtype))
        .round()
        .clamp(-half_range, half_range - 1)
    )
    return pack_codes((codes + half_range).flatten(-2), bits), exponents.to(torch.int8)


def decode_blocks(
    codes: torch.Tensor, exponents: torch.Tensor, bits: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers (..., width) that these stand for."""
    mantissas = unpack_codes(codes, bits, width).to(dtype) - (1 << bits - 1)
    blocks = mantissas.unflatten(-1, (exponents.shape[-1], -1))
    return (blocks * mantissa_steps(exponents, bits, dtype)).flatten(-2)


def mantissa_steps(exponents: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The number that a mantissa of 1 stands for, (..., blocks, 1)."""
    return torch.ones((), dtype=dtype, device=exponents.device).ldexp(
        exponents.to(dtype)[..., None] - (bits - 2)
    )


def channel_partners(turn: Turn, width: int, device: torch.device) -> torch.Tensor:
    """The channel that each channel of a key turns with, else itself (D,)."""
    channels = torch.eye(width, device=device)
    turned_channels = [
        turn(channels[None], torch.full((width,), distance, device=device))[0] for distance in MOVES
    ]
    mixed_channels = torch.stack(turned_channels).abs().sum(0) * (1 - channels)
    largest_mix, partner = mixed_channels.max(1)
    return torch.where(largest_mix > 0, partner, torch.arange(width, device=device))


def order_by_size(keys: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    """The channels (KV, D) of each head's keys (KV, n, D), the pairs of small numbers first.
    Turning a pair changes no size.
    """
    squares = keys.to(torch.promote_types(keys.dtype, torch.float32)).square().sum(1)
    pair_sizes = squares + squares[:, partners]
    channels = torch.arange(len(partners), device=keys.device)
    paired_channels = torch.minimum(channels, partners).argsort(stable=True)
    return paired_channels[pair_sizes[:, paired_channels].argsort(dim=1, stable=True)]
