"""How matrices lie in memory for the C library.

16 outputs lie beside each other, in blocks. Whole numbers of 2, 3, 4, 5, 6 or 8 bits stand for

    w = scale * (number - offset) + least      or, by a table of 16,
    w = scale * table[number] + least

where groups of inputs share scale and least value. A table may have a second one of 256ths, `fine`:
scale * (table[number] + fine[number] / 256). 32 inputs of a block take a vector of 64 bytes a
bit, each vector 4 bytes of every output; docs/native.md draws them. Scales are stored as files have
them, see SCALINGS. Other matrices are of bfloat16, two inputs of 16 outputs beside each other, or
of float16, float32 and float8 (e4m3), one input of 16 outputs; those of float8 have scales as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from foretell.native.arena import join_tensors

BLOCK = 16  # outputs beside each other
GROUP = 32  # inputs that lie together
SUPER = 256  # inputs whose scales share a factor
FORMATS = (
    "whole",
    "bfloat16",
    "float16",
    "float32",
    "float8",
)  # in the order of the library's numbers
FLOATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8": torch.float8_e4m3fn,
}
# How scales are stored, and least values, in the order of the library's numbers: float16 a group; a
# float16 for 256 inputs and a whole number of 8 bits a group, multiplied with each other; float32 a
# group; one byte e a group, 2**(e - 128); one of 4 bits of exponent and 3 of mantissa, halved; and,
# of least values alone, a zero point z from 0 to 255, which is -scale * z.
SCALINGS = ("none", "half", "super", "single", "power", "float8", "point")
SCALE_DTYPES = {"half": torch.float16, "single": torch.float32}  # the others are bytes
GROUPS = (16, 32, 64, 128, 256)
NARROW = range(-16, 16)  # numbers of a table that groups of 16 may have
# Values of groups (N, K / group): floats; uint8, powers as scales and zero points as least values;
# or float16 (N, K / 256) with int8 (N, K / group) that they are multiplied by.
Scales = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass
class Packed:
    """A matrix (outputs, inputs) as the library reads it.

    `weights` uint8, flat; `scales` and `minima` (blocks, groups, 16), or uint8 (blocks, K / 256,
    bytes) where they share factors; None where there are none. `inputs` is a multiple of 32: what
    it exceeds the matrix by is zero. Fields from `bits` on are of whole numbers, `table` int8
    (16,), as `fine` is; floats of 8 bits have `group` and `scales` too.
    """

    format: str
    outputs: int
    inputs: int
    weights: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    bits: int = 0
    group: int = 0
    offset: int = 0
    scaling: str = "none"
    least_scaling: str = "none"
    table: torch.Tensor | None = None
    fine: torch.Tensor | None = None

    @property
    def blocks(self) -> int:
        return -(-self.outputs // BLOCK)

    @property
    def is_whole(self) -> bool:
        return self.format == "whole"

    @property
    def name(self) -> str:
        """What its numbers are called: int8, int5, bfloat16."""
        return f"int{self.bits}" if self.is_whole else self.format

    @property
    def rounding(self) -> str:
        """The number format of other matrices beside it, one of `rounding.DTYPES`."""
        return "bfloat16" if not self.is_whole else "int8" if self.bits > 4 else "int4"

    @property
    def nbytes(self) -> int:
        parts = (self.weights, self.scales, self.minima)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def layout(self) -> tuple[object, ...]:
        """All that matrices must have in common to be joined."""
        tables = tuple(
            None if table is None else tuple(table.tolist()) for table in (self.table, self.fine)
        )
        scales = self.bits, self.group, self.offset, self.scaling, self.least_scaling, tables
        return self.format, self.inputs, *scales

    def check(self) -> None:
        """Raises ValueError where the matrix holds other numbers than its sizes say."""
        bits = self.bits if self.is_whole else 8 * FLOATS[self.format].itemsize
        weight_bytes = self.blocks * BLOCK * self.inputs * bits // 8
        conditions = [
            self.inputs > 0 and self.inputs % GROUP == 0 and self.outputs > 0,
            self.weights.dtype is torch.uint8 and self.weights.shape == (weight_bytes,),
            self._are_scales(self.scales, self.scaling),
            self._are_scales(self.minima, self.least_scaling),
            *(
                table is None or (table.dtype is torch.int8 and table.shape == (16,))
                for table in (self.table, self.fine)
            ),
        ]
        if not all(conditions):
            matrix_name = f"{self.name} matrix ({self.outputs}, {self.inputs})"
            raise ValueError(
                f"a {matrix_name} has weights {tuple(self.weights.shape)} or other scales"
            )

    def _are_scales(self, values: torch.Tensor | None, scaling: str) -> bool:
        if values is None or scaling == "none":
            return values is None and scaling == "none"
        if self.group not in GROUPS or self.inputs % self.group:
            return False
        shape: tuple[int, ...] = (self.blocks, self.inputs // self.group, BLOCK)
        if scaling == "super":
            shape = self.blocks, self.inputs // SUPER, (2 + SUPER // self.group) * BLOCK
            if self.inputs % SUPER:
                return False
        if self.group < GROUP and self.bits in (4, 5, 8) and not self._has_narrow_table():
            return False
        return values.shape == shape and values.dtype is SCALE_DTYPES.get(scaling, torch.uint8)

    def _has_narrow_table(self) -> bool:
        return self.table is not None and all(number in NARROW for number in self.table.tolist())

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where its numbers lie in memory."""
        parts = (self.weights, self.scales, self.minima)
        return tuple(part.data_ptr() for part in parts if part is not None)

    def part(self, first_block: int, outputs: int) -> Packed:
        """The matrix of so many outputs from a block on, which shares this one's memory."""
        block_bytes = len(self.weights) // self.blocks
        end = first_block - (-outputs // BLOCK)
        return replace(
            self,
            outputs=outputs,
            weights=self.weights[first_block * block_bytes : end * block_bytes],
            scales=None if self.scales is None else self.scales[first_block:end],
            minima=None if self.minima is None else self.minima[first_block:end],
        )

    def split(self, sizes: list[int]) -> list[Packed]:
        """Splits into matrices of so many outputs each, which share this one's memory; multiples of
        16.
        """
        split_parts = []
        first_block = 0
        for size in sizes:
            assert size % BLOCK == 0, "blocks of outputs cannot be divided"
            split_parts.append(self.part(first_block, size))
            first_block += size // BLOCK
        return split_parts

    def take(self, outputs: torch.Tensor) -> Packed:
        """Returns the matrix of these outputs (n,) alone, in their order."""
        missing_outputs = -len(outputs) % BLOCK
        padded_outputs = F.pad(outputs, (0, missing_outputs), value=int(outputs[-1]))

        def take_lanes(values: torch.Tensor) -> torch.Tensor:
            """Of (blocks, n, 16, bytes), bytes of an output beside those of the next one."""
            lanes = values[padded_outputs // BLOCK, :, padded_outputs % BLOCK]
            return lanes.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()

        def take_scales(values: torch.Tensor | None, scaling: str) -> torch.Tensor | None:
            if values is None or scaling != "super":
                return None if values is None else take_lanes(values[..., None])[..., 0]
            return _join_super(*(take_lanes(part) for part in _split_super(values)))

        # Of each number of a float, or of 4 inputs in every other format.
        lane_bytes = {"float16": 2, "float8": 1}.get(self.format, 4)
        return replace(
            self,
            outputs=len(outputs),
            weights=take_lanes(self.weights.view(self.blocks, -1, BLOCK, lane_bytes)).reshape(-1),
            scales=take_scales(self.scales, self.scaling),
            minima=take_scales(self.minima, self.least_scaling),
        )

    @staticmethod
    def join(parts: list[Packed]) -> Packed:
        """Joins several of one layout into one, which shares their memory where they lie side by
        side; all but the last have multiples of 16.
        """
        first_part = parts[0]
        assert all(part.outputs % BLOCK == 0 for part in parts[:-1])
        assert all(part.layout == first_part.layout for part in parts), "their layouts differ"

        def join_values(values: list[torch.Tensor | None]) -> torch.Tensor | None:
            present = [value for value in values if value is not None]
            return join_tensors(present) if present else None

        return replace(
            first_part,
            outputs=sum(part.outputs for part in parts),
            weights=join_tensors([part.weights for part in parts]),
            scales=join_values([part.scales for part in parts]),
            minima=join_values([part.minima for part in parts]),
        )


# --- into their places


def pack_whole(
    numbers: torch.Tensor,
    bits: int,
    group: int,
    scales: Scales,
    minima: Scales | None = None,
    offset: int = 0,
    table: Sequence[int] | None = None,
    fine: Sequence[int] | None = None,
) -> Packed:
    """Packs whole numbers, uint8 (N, K) of so many bits, with the values of their groups.

    Floats are stored in 16 bits where all of them are numbers of float16.
    """
    outputs, inputs = numbers.shape
    missing_outputs = -outputs % BLOCK
    if missing_outputs:
        numbers = F.pad(numbers, (0, 0, 0, missing_outputs))
    # (block, output, group, quad, input) -> quads of (block, group, output, input)
    quads = numbers.view(-1, BLOCK, inputs // GROUP, 8, 4).permute(3, 0, 2, 1, 4)
    if bits == 8:
        vectors = list(quads)
    else:
        low_bits = 4 if bits >= 4 else 2
        vectors = _join_fields([quad & (1 << low_bits) - 1 for quad in quads], low_bits)
        if bits > low_bits:
            upper = [quad >> low_bits for quad in quads]
            vectors += _join_fields(upper, bits - low_bits)
    scaling, scale_values = _pack_scales(scales, "power", missing_outputs)
    least_scaling, least_values = "none", None
    if minima is not None:
        least_scaling, least_values = _pack_scales(minima, "point", missing_outputs)
    return Packed(
        "whole",
        outputs,
        inputs,
        torch.stack(vectors, 2).reshape(-1),
        scale_values,
        least_values,
        bits,
        group,
        offset,
        scaling,
        least_scaling,
        None if table is None else torch.tensor(table, dtype=torch.int8),
        None if fine is None else torch.tensor(fine, dtype=torch.int8),
    )


def _join_fields(quads: list[torch.Tensor], bits: int) -> list[torch.Tensor]:
    """Puts 8 quads of few bits into fields of vectors: of 4 bits each fourth one together, of
    fewer those beside each other.
    """
    count = 8 // bits
    places = [quads[i::4] for i in range(4)] if bits == 4 else None
    if places is None:
        places = [quads[i : i + count] for i in range(0, 8, count)]
    vectors = []
    for fields in places:
        vector = fields[0]
        for place, field in enumerate(fields[1:], 1):
            vector = vector | field << place * bits
        vectors.append(vector)
    return vectors


def _pack_scales(values: Scales, of_bytes: str, missing_outputs: int) -> tuple[str, torch.Tensor]:
    """How values of groups are stored, and as what. `of_bytes`: what bytes are."""

    def lanes(part: torch.Tensor) -> torch.Tensor:
        """Lays (N, G) out as (blocks, G, 16)."""
        padded = F.pad(part, (0, 0, 0, missing_outputs))
        return padded.view(-1, BLOCK, part.shape[1]).transpose(1, 2).contiguous()

    if isinstance(values, tuple):
        factors, multipliers = values
        per_super = multipliers.shape[1] // factors.shape[1]
        many = lanes(multipliers.view(torch.uint8)).unflatten(1, (-1, per_super))
        one = lanes(factors.half())[..., None].view(torch.uint8)
        return "super", _join_super(one, many.flatten(1, 2)[..., None])
    if values.dtype is torch.uint8:
        return of_bytes, lanes(values)
    if values.dtype is torch.float8_e4m3fn:
        return "float8", lanes(values.view(torch.uint8))
    halves = values.half()
    is_exact = values.dtype is torch.float16 or torch.equal(halves.to(values.dtype), values)
    return ("half", lanes(halves)) if is_exact else ("single", lanes(values.float()))


def _join_super(factors: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """Records uint8 (blocks, S, bytes) of bytes of factors (blocks, S, 16, 2) and of multipliers
    (blocks, G, 16, 1).
    """
    record_parts = [part.reshape(*factors.shape[:2], -1) for part in (factors, multipliers)]
    return torch.cat(record_parts, -1)


def _split_super(records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of `_join_super`."""
    factors, multipliers = records[..., : 2 * BLOCK], records[..., 2 * BLOCK :]
    return factors.unflatten(-1, (BLOCK, 2)), multipliers.reshape(len(records), -1, BLOCK, 1)


def pack_floats(weight: torch.Tensor) -> Packed:
    """Packs a matrix (N, K) of bfloat16, float16 or float32."""
    outputs, inputs = weight.shape
    format_name = next(name for name, dtype in FLOATS.items() if dtype is weight.dtype)
    beside = 2 if format_name == "bfloat16" else 1  # inputs of an output
    if weight.dtype is torch.float8_e4m3fn:
        weight = weight.view(torch.uint8)  # which torch can pad
    padded_weight = F.pad(weight, (0, 0, 0, -outputs % BLOCK))
    lanes = padded_weight.view(-1, BLOCK, inputs // beside, beside).transpose(1, 2).contiguous()
    return Packed(format_name, outputs, inputs, lanes.view(torch.uint8).reshape(-1))


def pack_float8(weight: torch.Tensor, group: int, scales: torch.Tensor) -> Packed:
    """Packs a matrix (N, K) of float8_e4m3fn with the floats (N, K / group) that its groups are
    multiplied by.
    """
    missing_outputs = -weight.shape[0] % BLOCK
    scaling, scale_values = _pack_scales(scales, "power", missing_outputs)
    packed = pack_floats(weight)
    return replace(packed, group=group, scaling=scaling, scales=scale_values)


# --- and back


def unpack_numbers(packed: Packed) -> torch.Tensor:
    """Unpacks the whole numbers of a matrix as they are stored, uint8 (N, K)."""
    bits = packed.bits
    vectors = packed.weights.view(packed.blocks, -1, bits, BLOCK, 4).unbind(2)
    if bits == 8:
        quads = list(vectors)
    else:
        low_bits = 4 if bits >= 4 else 2
        low_count = 8 * low_bits // 8
        quads = _split_fields(vectors[:low_count], low_bits)
        if bits > low_bits:
            upper = _split_fields(vectors[low_count:], bits - low_bits)
            quads = [quad | more << low_bits for quad, more in zip(quads, upper, strict=True)]
    # quads of (block, group, output, input) -> (block, output, group, quad, input)
    numbers = torch.stack(quads).permute(1, 3, 2, 0, 4)
    return numbers.reshape(-1, packed.inputs)[: packed.outputs]


def _split_fields(vectors: Sequence[torch.Tensor], bits: int) -> list[torch.Tensor]:
    """The 8 quads of `_join_fields`."""
    mask, places = (1 << bits) - 1, range(8 // bits)
    if bits == 4:
        return [vector >> place * bits & mask for place in places for vector in vectors]
    return [vector >> place * bits & mask for vector in vectors for place in places]


def whole_values(packed: Packed) -> torch.Tensor:
    """What the whole numbers stand for before they are scaled, int16 (N, K), float32 where they
    have 256ths.
    """
    numbers = unpack_numbers(packed)
    if packed.table is not None and packed.fine is not None:
        return (packed.table.float() + packed.fine.float() / 256)[numbers.long()]
    if packed.table is not None:
        return packed.table.to(torch.int16)[numbers.long()]
    return numbers.to(torch.int16) - packed.offset


def group_scales(packed: Packed) -> torch.Tensor:
    """The scales of a matrix of whole numbers, float32 (N, K / group)."""
    assert packed.scales is not None
    return _group_values(packed, packed.scales, packed.scaling)


def group_minima(packed: Packed) -> torch.Tensor | None:
    """The least values of its groups, float32 (N, K / group); None where there are none."""
    if packed.minima is None:
        return None
    minima = _group_values(packed, packed.minima, packed.least_scaling)
    return -group_scales(packed) * minima if packed.least_scaling == "point" else minima


def _group_values(packed: Packed, values: torch.Tensor, scaling: str) -> torch.Tensor:
    """What `_pack_scales` stored, float32 (N, K / group); of zero points z itself."""

    def rows(lanes: torch.Tensor) -> torch.Tensor:
        return lanes.transpose(1, 2).flatten(0, 1)[: packed.outputs]

    if scaling == "super":
        factor_bytes, multiplier_bytes = _split_super(values)
        factors = rows(factor_bytes.contiguous().view(torch.float16)[..., 0]).float()
        multipliers = rows(multiplier_bytes[..., 0].view(torch.int8)).float()
        return factors.repeat_interleave(SUPER // packed.group, 1) * multipliers
    stored = rows(values)
    if scaling == "power":
        exponents = stored.to(torch.int32)
        below = 1 + exponents << 21  # numbers below the normal ones
        return torch.where(exponents < 2, below, exponents - 1 << 23).view(torch.float32)
    if scaling == "float8":
        return (stored.to(torch.int16) << 7).view(torch.float16).float() * 128
    return stored.float()


def unpack_matrix(packed: Packed) -> torch.Tensor:
    """Unpacks the matrix (N, inputs): floats as they were, what has scales as float32."""
    if not packed.is_whole:
        beside = 2 if packed.format == "bfloat16" else 1
        lanes = packed.weights.view(FLOATS[packed.format])
        pairs = lanes.view(packed.blocks, packed.inputs // beside, BLOCK, beside)
        floats = pairs.transpose(1, 2).reshape(-1, packed.inputs)[: packed.outputs]
        if packed.scales is None:
            return floats
        scales = group_scales(packed).repeat_interleave(packed.group, 1)
        return floats.float() * scales
    values = whole_values(packed).float().unflatten(1, (-1, packed.group))
    scales = group_scales(packed)[..., None]
    if packed.minima is None:
        return (values * scales).flatten(1)
    minima = _group_values(packed, packed.minima, packed.least_scaling)[..., None]
    if packed.least_scaling == "point":
        return ((values - minima) * scales).flatten(1)
    return (values * scales + minima).flatten(1)


def centre_of(packed: Packed) -> tuple[int, int]:
    """How runtimes with numbers of 4 or 8 bits around zero take a matrix: in how many bits, and
    what is to be taken from what the numbers stand for. Raises LookupError where they cannot.
    """
    if packed.fine is not None:
        raise LookupError("its numbers of 4 bits are of a table of floats")
    if packed.table is not None:
        lowest, highest = int(packed.table.min()), int(packed.table.max())
    else:
        lowest, highest = -packed.offset, (1 << packed.bits) - 1 - packed.offset
    bits = 4 if highest - lowest < 16 else 8
    half = 1 << bits - 1
    return bits, 0 if -half <= lowest and highest < half else lowest + half


def centred_numbers(
    packed: Packed,
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor | None]:
    """Whole numbers uint8 (N, K) around 8 or 128, their bits, 4 or 8, and scales and least values
    float32 (N, K / group) with which they are the matrix.
    """
    bits, centre = centre_of(packed)
    numbers = (whole_values(packed) - centre + (1 << bits - 1)).to(torch.uint8)
    scales, minima = group_scales(packed), group_minima(packed)
    if centre:
        minima = scales * centre if minima is None else minima + centre * scales
    return numbers, bits, scales, minima
