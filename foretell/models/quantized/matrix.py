"""A matrix of few bits as every format of files says it: numbers, and what groups of them share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from foretell.native.packing import GROUP, GROUPS, SUPER, Packed, pack_float8, pack_whole

HALVED_GROUP = 16
HALVED_BITS = (2, 3, 6)  # of numbers that groups of 16 may have where there is no table
KNOWN_BITS = (2, 3, 4, 5, 6, 8)
POWER_BIAS = 127  # of scales that are bytes, powers of 2
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # floats of 4 bits, twice each


@dataclass
class Quantized:
    """A matrix (N, K) that stands for

        scale * (number - zero)      or, by a table of 16,      scale * table[number]

    where `group` inputs share scale and zero. A table of other numbers than whole ones is stored in
    16 bits. `numbers` uint8 (N, K); `scales` floats (N, G), or
    uint8 for powers of 2 that belong to the table DOUBLED; `zeros` uint8 (N, G), or one number for
    all. `order` int64 (K,): the input that each column reads, where they do not lie in order.
    """

    numbers: torch.Tensor
    bits: int
    group: int
    scales: torch.Tensor
    zeros: torch.Tensor | int = 0
    table: Sequence[float] | None = None
    order: torch.Tensor | None = None

    def pack(self) -> Packed:
        """Puts it into the C library's order, its columns in theirs. Raises LookupError for groups
        that no kernel takes.
        """
        group = self._stored_group()
        zeros, minima, scales, fine = self.zeros, None, self.scales, None
        table = None if self.table is None else [int(number) for number in self.table]
        if self.table is not None and table != list(self.table):
            table, fine, unit = _split_table(self.table)
            scales = scales.float() * unit
        if isinstance(zeros, torch.Tensor):
            is_one = bool((zeros == zeros.flatten()[0]).all())
            zeros, minima = (int(zeros.flatten()[0]), None) if is_one else (0, zeros)
        return pack_whole(
            self.numbers,
            self.bits,
            group,
            self._repeat(scales, group),
            None if minima is None else self._repeat(minima, group),
            zeros,
            table,
            fine,
        )

    def unpack(self) -> torch.Tensor:
        """What it stands for, float32 (N, K), its columns in the order of the inputs."""
        scales = self.scales
        values = self.numbers.float()
        if self.table is not None:
            values = torch.tensor(self.table, dtype=torch.float32)[self.numbers.long()]
        if scales.dtype is torch.uint8:
            scales = torch.ldexp(torch.full(scales.shape, 0.5), scales.int() - POWER_BIAS)
        elif isinstance(self.zeros, torch.Tensor):
            values -= self._spread(self.zeros)
        else:
            values -= self.zeros
        values *= self._spread(scales.float())
        return values if self.order is None else values[:, self.order.argsort()]

    @staticmethod
    def join(matrices: list[Quantized]) -> Quantized:
        """One matrix of several, one below the other. Raises LookupError where they differ."""
        first = matrices[0]
        for other in matrices[1:]:
            same = (other.bits, other.group, other.table) == (first.bits, first.group, first.table)
            if (
                not same
                or type(other) is not type(first)
                or (other.order is not None or first.order is not None)
            ):
                raise LookupError(
                    "its experts are not packed alike, or have inputs in other orders"
                )
        zeros = [matrix.zeros for matrix in matrices]
        joined_zeros: torch.Tensor | int = first.zeros
        tensors = [zero for zero in zeros if isinstance(zero, torch.Tensor)]
        if len(tensors) == len(matrices):
            joined_zeros = torch.cat(tensors)
        elif tensors or len(set(zeros)) > 1:
            raise LookupError("some of its experts have zeros of their own, and others have not")
        return replace(
            first,
            numbers=torch.cat([matrix.numbers for matrix in matrices]),
            scales=torch.cat([matrix.scales for matrix in matrices]),
            zeros=joined_zeros,
        )

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values (N, G) of each group for each of its inputs."""
        return values.repeat_interleave(self.group, 1)[:, : self.numbers.shape[1]]

    def _repeat(self, values: torch.Tensor, group: int) -> torch.Tensor:
        """Values (N, G) of each group for each of the smaller groups that are stored."""
        group_count = self.numbers.shape[1] // group
        return values.repeat_interleave(self.group // group, 1)[:, :group_count]

    def _stored_group(self) -> int:
        """The largest group of the library's that divides the matrix's own."""
        inputs = self.numbers.shape[1]
        if inputs % GROUP:
            raise LookupError(f"it has {inputs} inputs, which is no multiple of {GROUP}")
        group = math.gcd(self.group, inputs, SUPER)
        is_halved = group == HALVED_GROUP and (self.bits in HALVED_BITS or self.table is not None)
        if group not in GROUPS or (group < GROUP and not is_halved):
            raise LookupError(
                f"its groups of {self.group} share no size with {', '.join(map(str, GROUPS[1:]))}, "
                f"which the kernels take of {self.bits} bits"
            )
        return group


def _split_table(table: Sequence[float]) -> tuple[list[int], list[int], float]:
    """A table as whole numbers of 8 bits and 256ths of 8 bits, and the number that all of it is to
    be multiplied by.
    """
    unit = max(abs(number) for number in table) / 127 or 1.0
    steps = [round(number / unit * 256) for number in table]
    coarse = [step + 128 >> 8 for step in steps]
    return coarse, [step - 256 * whole for step, whole in zip(steps, coarse, strict=True)], unit


class Floats8(Quantized):
    """A matrix of floats of 8 bits, e4m3: `numbers` are their bytes."""

    def pack(self) -> Packed:
        group = self._stored_group()
        return pack_float8(
            self.numbers.view(torch.float8_e4m3fn), group, self._repeat(self.scales, group)
        )

    def unpack(self) -> torch.Tensor:
        return self.numbers.view(torch.float8_e4m3fn).float() * self._spread(self.scales.float())


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Takes `count` numbers of so many bits, uint8 (N, count), out of words int32 (N, W): the
    lowest bits of a word first, and a number may begin in one and end in the next.
    """
    missing_words = -words.shape[1] % bits
    if missing_words:
        words = torch.nn.functional.pad(words, (0, missing_words))
    runs = words.unflatten(1, (-1, bits))  # of 32 numbers each
    numbers = torch.empty(*runs.shape[:2], 32, dtype=torch.uint8)
    mask = (1 << bits) - 1
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        low_bits = min(bits, 32 - shift)
        number = runs[..., word] >> shift & (1 << low_bits) - 1
        if low_bits < bits:
            number = number | runs[..., word + 1] << low_bits & mask
        numbers[..., place] = number.to(torch.uint8)
    return numbers.flatten(1)[:, :count]


def word_count(count: int, bits: int) -> int:
    """How many words `unpack_words` reads for so many numbers."""
    return -(-count * bits // 32)


def unpack_nibbles(packed: torch.Tensor, is_low_first: bool = True) -> torch.Tensor:
    """Two numbers of 4 bits of each byte: uint8 (..., n) -> (..., 2 n)."""
    halves = [packed & 15, packed >> 4]
    return torch.stack(halves if is_low_first else halves[::-1], -1).flatten(-2)
