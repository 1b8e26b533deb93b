"""Keys with one exponent a block: against plain loops, and channels in another order."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.errors import Unsupported
from foretell.kv.store.base import bytes_of
from foretell.kv.store.block_quantization import (
    BlockQuantization,
    Blocks,
    channel_partners,
    decode_blocks,
    encode_blocks,
    order_by_size,
)
from tests.kv.policies import Decoder, target
from tests.models.decoder.families import tiny

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "block-quantization:bits=2,block=4,sort=yes,buffer=5"
LARGE_SPEC = "block-quantization:buffer=400"

HALVES = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])  # partners of rotated halves


def through(numbers: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    codes, exponents = encode_blocks(numbers, bits, block)
    assert codes.dtype == torch.uint8 and exponents.dtype == torch.int8
    return decode_blocks(codes, exponents, bits, numbers.shape[-1], torch.float64)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [2, 8])
def test_against_a_loop(bits: int, block: int) -> None:
    numbers = torch.randn(3, 5, 8, dtype=torch.float64) * 7
    numbers[0, 0] = 0
    numbers[0, 1] = torch.tensor([4.0, -4.0, 2.0, 1.0, 0.5, -0.25, 8.0, -8.0])
    found = through(numbers, bits, block)
    for ours, row in zip(found.view(-1, block), numbers.view(-1, block), strict=True):
        most = max(abs(float(x)) for x in row)
        step = 2.0 ** (math.floor(math.log2(most)) - bits + 2) if most else 1.0
        half = 2 ** (bits - 1)
        for x, y in zip(row.tolist(), ours.tolist(), strict=True):
            assert y == min(max(round(x / step), -half), half - 1) * step
            # A whole step only where the largest mantissa was too small.
            assert abs(x - y) <= step / 2 or (x > 0 and abs(x - y) <= step)


def test_numbers_at_the_ends_of_a_type_stay_finite() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        info = torch.finfo(dtype)
        numbers = torch.tensor([info.max, info.tiny, -info.max, 0, 1, 2, 3, 4], dtype=dtype)
        assert bool(through(numbers, 4, 4).isfinite().all())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_partners_are_the_channels_that_turn_together(family: str) -> None:
    decoder = Decoder(tiny(family), family)
    width = decoder.layout[0][1]
    found = channel_partners(decoder.find_turn("test"), width, torch.device("cpu"))
    assert torch.equal(found[found], torch.arange(width))
    turned = found != torch.arange(width)
    rotary = int(turned.sum())
    assert rotary in (width, width // 2, width // 4)
    assert torch.equal(found[: rotary // 2], torch.arange(rotary // 2, rotary))


def test_pairs_lie_side_by_side_the_small_ones_first() -> None:
    keys = torch.randn(2, 9, 8) * torch.tensor([9, 1, 5, 0.1, 0.2, 1, 7, 8.0])
    for head, order in enumerate(order_by_size(keys, HALVES).tolist()):
        assert sorted(order) == [*range(8)]
        sizes = []
        for first, second in zip(order[::2], order[1::2], strict=True):
            assert HALVES[first] == second
            sizes.append(float(keys[head][:, [first, second]].norm()))
        assert sizes == sorted(sizes)


def form(sort: bool, bits: int = 4, block: int = 4) -> Blocks:
    return Blocks(bits, block, (8,), {8: HALVES} if sort else None)


def stored(keys: torch.Tensor, made: Blocks) -> torch.Tensor:
    back, values = made.decode_rows(made.encode_rows([keys], [keys + 1], 0)[0], 0)
    assert torch.equal(values, keys + 1), "values are as they were"
    assert back.dtype == keys.dtype
    return back


def test_sorted_keys_come_back_in_their_order() -> None:
    """With numbers that a mantissa holds exactly, products with queries are those of the keys."""
    keys = torch.randint(-7, 7, (2, 6, 8)).double()
    keys[..., 0] = 7  # each block's exponent is the same
    keys[..., HALVES[0]] = 7
    q = torch.randn(2, 3, 8).double()
    for made in (form(False, 8), form(True, 8)):
        assert torch.equal(q @ stored(keys, made).mT, q @ keys.mT)


def test_blocks_are_read_together_as_one_by_one() -> None:
    made = form(True)
    codes = [
        made.encode_rows([torch.randn(2, n, 8)], [torch.randn(2, n, 8)], 0)[0] for n in (9, 4, 4)
    ]
    keys, values = made.decode_all(codes, 0)
    assert torch.equal(keys, torch.cat([made.decode_rows(code, 0)[0] for code in codes], 1))
    assert torch.equal(values, torch.cat([code["values"] for code in codes], 1))


def test_with_blocks_as_wide_as_keys_sorting_changes_nothing() -> None:
    keys = torch.randn(2, 6, 8) * torch.tensor([9, 1, 5, 0.1, 0.2, 1, 7, 8.0])
    assert torch.equal(stored(keys, form(True, block=8)), stored(keys, form(False, block=8)))


def test_large_channels_coarsen_their_own_block_alone() -> None:
    keys = torch.randn(2, 50, 8).double()
    keys[..., [1, 5, 2, 6]] *= 100  # two pairs, one of their channels in each unsorted block
    small = [0, 4, 3, 7]
    away = [(stored(keys, form(sort)) - keys)[..., small].norm() for sort in (False, True)]
    assert away[1] < away[0] / 10


@pytest.mark.parametrize("sort", [False, True])
def test_bytes_are_those_of_the_card(sort: bool) -> None:
    heads, count, width = 3, 128, 64
    keys = torch.randn(heads, count, width).bfloat16()
    partners = {width: torch.arange(width).roll(width // 2)} if sort else None
    codes = Blocks(4, 32, (width,), partners).encode_rows([keys], [keys], 0)
    of_keys = bytes_of(codes) - keys.numel() * 2
    assert of_keys == keys.numel() * 4 // 8 + keys.numel() // 32 + (heads * width if sort else 0)
    assert of_keys <= 0.3 * keys.numel() * 2


def test_a_family_without_rotation_cannot_be_sorted() -> None:
    decoder = Decoder(tiny("gpt2"), "gpt2")
    with pytest.raises(Unsupported, match="block-quantization"):
        BlockQuantization(sort=True).build_policy(decoder)
    assert not BlockQuantization().build_policy(decoder).holds_rows
    assert target().layout[0][1] == 8, "rows of 8 channels are what these tests assume"
