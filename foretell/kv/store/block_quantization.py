"""Stores keys in a few bits, blocks of channels with one exponent each.

Of `block` neighbouring channels of a key the largest number decides an exponent, one byte, and
every channel has a mantissa of `bits` behind it. With `sort`, channels of like size share blocks,
so that a few large ones coarsen their own block alone: the pairs of channels that positions rotate
are ordered by their size in the rows that are stored, for every head. A prompt is stored when it is
read; behind it every `buffer` tokens are, and until then they stay as they are.

Paper: Trukhanov and Soloveychik, Accurate Block Quantization in LLMs with Outliers,
arXiv:2403.20137
Guarantee: lossy: keys are rounded; with drafts the text is the one without them
Cost: target 1, and decoding what is stored; a number of a key takes `bits` + 8 / `block`
Needs: cache rows of every layer, of all of the text; with `sort`, rotary positions
Trains: nothing
Differs:
- the paper sorts rows of the key weights by their norms, once; here rotated keys themselves are
measured, so that weights stay as they are and any executor's keys serve
- how the paper rounds is not known to us: to the nearest mantissa, of equal ones the even
- a block is as wide as divides a head's width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV
from foretell.kv.slots import Turn, turning
from foretell.kv.store.base import Code, LayerForm, Rows, Stored
from foretell.kv.store.packing import divisor, pack, unpack

if TYPE_CHECKING:
    from foretell.core.model import Model

BITS = (2, 4, 8)
SMALLEST, LARGEST = -100, 127  # exponents of two
MOVES = (1, 300, 40_000)  # positions; one of them turns any pair that is turned at all


@dataclass(frozen=True)
class BlockQuantization(KV):
    """Counts of bits, channels and tokens."""

    role = "encoder"

    bits: int = 4  # of a mantissa, its sign included: 2, 4 or 8
    block: int = 32  # channels that share an exponent, at most
    sort: bool = False  # whether channels of like size share blocks
    buffer: int = 64  # tokens that are stored together

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise BadConfig.field("block-quantization:bits", self.bits, "2, 4 or 8")
        for name in ("block", "buffer"):
            value = getattr(self, name)
            if value < 1:
                raise BadConfig.field(f"block-quantization:{name}", value, "at least 1")

    def policy(self, target: Model) -> Stored:
        self.fits(target)
        widths = tuple(shape[1] for shape in target.layout if shape is not None)
        partners = None
        if self.sort:
            turn = turning(self.name, target)
            partners = {width: pairs(turn, width, target.device) for width in {*widths}}
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
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, place: int
    ) -> Code:
        code = {"values": values.clone()}
        width = keys.shape[2]
        if self.partners is not None:
            order = by_size(keys, self.partners[width])
            code["order"] = order.to(torch.uint8 if width <= 256 else torch.int16)
            keys = keys.gather(2, order[:, None].expand_as(keys))
        code["codes"], code["exponents"] = encoded(keys, self.bits, divisor(width, self.block))
        return code

    def decode(self, code: Code, layer: int) -> Rows:
        values = code["values"]
        wide = torch.promote_types(values.dtype, torch.float32)
        keys = decoded(code["codes"], code["exponents"], self.bits, self.widths[layer], wide)
        if "order" in code:
            back = code["order"].long().argsort(-1)
            keys = keys.gather(-1, back[..., None, :].expand_as(keys))
        return keys.to(values.dtype), values


def encoded(numbers: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers (..., D) as packed mantissas, uint8 (..., D * bits / 8), and an exponent for each
    block, int8 (..., D / block).
    """
    blocks = numbers.unflatten(-1, (-1, block))
    wide = blocks.to(torch.promote_types(numbers.dtype, torch.float32))
    exponents = wide.abs().amax(-1).frexp().exponent - 1  # of the largest number, rounded down
    exponents = exponents.clamp(SMALLEST, LARGEST)
    half = 1 << bits - 1
    codes = (wide / steps(exponents, bits, wide.dtype)).round().clamp(-half, half - 1)
    return pack((codes + half).flatten(-2), bits), exponents.to(torch.int8)


def decoded(
    codes: torch.Tensor, exponents: torch.Tensor, bits: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers (..., width) that these stand for."""
    mantissas = unpack(codes, bits, width).to(dtype) - (1 << bits - 1)
    blocks = mantissas.unflatten(-1, (exponents.shape[-1], -1))
    return (blocks * steps(exponents, bits, dtype)).flatten(-2)


def steps(exponents: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """What a mantissa of 1 stands for, (..., blocks, 1)."""
    return torch.ones((), dtype=dtype, device=exponents.device).ldexp(
        exponents.to(dtype)[..., None] - (bits - 2)
    )


def pairs(turn: Turn, width: int, device: torch.device) -> torch.Tensor:
    """Of each channel of a key the one that it turns with, else itself (D,)."""
    channels = torch.eye(width, device=device)
    moved = [turn(channels[None], torch.full((width,), by, device=device))[0] for by in MOVES]
    mixed = torch.stack(moved).abs().sum(0) * (1 - channels)
    most, partner = mixed.max(1)
    return torch.where(most > 0, partner, torch.arange(width, device=device))


def by_size(keys: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    """The channels (KV, D) of each head's keys (KV, n, D), the pairs of small numbers first.
    Turning a pair changes no size.
    """
    squares = keys.to(torch.promote_types(keys.dtype, torch.float32)).square().sum(1)
    sizes = squares + squares[:, partners]
    channels = torch.arange(len(partners), device=keys.device)
    together = torch.minimum(channels, partners).argsort(stable=True)
    return together[sizes[:, together].argsort(dim=1, stable=True)]
