"""Codes in bytes, and numbers on grids, against plain loops."""

from __future__ import annotations

import pytest
import torch

from foretell.kv.store.packing import BITS, largest_divisor, pack_codes, round_to_grid, unpack_codes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 5, 16])
def test_codes_come_back_from_as_few_bytes_as_they_need(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (3, 2, count), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, -(-count * bits // 8))
    assert torch.equal(unpack_codes(packed, bits, count), codes)


def on_grid(numbers: list[float], bits: int) -> list[float]:
    """Those of a group, rounded one by one."""
    low, high = min(numbers), max(numbers)
    step = (high - low) / (2**bits - 1)
    return [low + round((x - low) / step) * step if step else low for x in numbers]


@pytest.mark.parametrize("bits", BITS)
def test_numbers_are_rounded_group_by_group(bits: int) -> None:
    numbers = torch.randn(2, 12, dtype=torch.float64)
    found = round_to_grid(numbers, bits, 4).restore_numbers(bits, 12)
    for row, ours in zip(numbers.tolist(), found.tolist(), strict=True):
        want = [x for start in (0, 4, 8) for x in on_grid(row[start : start + 4], bits)]
        assert ours == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_no_number_is_more_than_half_a_step_away(bits: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    # Far from 0, where bfloat16 is coarse.
    numbers = (torch.randn(500, 32, generator=random) * 3 + 11).to(dtype)
    grid = round_to_grid(numbers, bits, 16)
    away = (grid.restore_numbers(bits, 32) - numbers.float()).abs().unflatten(-1, (2, 16))
    half = grid.step.float()[..., None] / 2
    assert bool((away <= half * (1 + 1e-5) + 1e-6).all())


def test_equal_numbers_are_kept_as_they_are() -> None:
    numbers = torch.full((1, 8), 0.3, dtype=torch.bfloat16)
    assert torch.equal(
        round_to_grid(numbers, 2, 8).restore_numbers(2, 8).to(torch.bfloat16), numbers
    )


def test_numbers_that_do_not_count_widen_no_grid() -> None:
    numbers = torch.tensor([[0.0, 1.0, 100.0, 0.5], [7.0, 7.0, 7.0, 7.0]])
    counted = torch.tensor([[True, True, False, True], [False] * 4])
    grid = round_to_grid(numbers, 4, 4, counted)
    assert grid.step[0, 0] == pytest.approx(1 / 15)
    assert bool(grid.restore_numbers(4, 4).isfinite().all())


def test_the_largest_divisor() -> None:
    for count in range(1, 40):
        for most in range(1, 45):
            sizes = [size for size in range(1, most + 1) if count % size == 0]
            assert largest_divisor(count, most) == max(sizes)
