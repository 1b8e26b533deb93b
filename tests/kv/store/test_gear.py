"""Rows in a few bits with corrections: against plain loops, and what each correction promises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foretell.kv.store.base import bytes_of
from foretell.kv.store.gear import (
    Gear,
    Recipe,
    extreme_places,
    from_segments,
    in_segments,
    thin_matrices,
)
from tests.kv.policies import PROMPT, run, target
from tests.kv.store.test_packing import on_grid

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "gear:bits=2,buffer=4"
LARGE_SPEC = "gear:buffer=400"

HEADS, COUNT, WIDTH = 2, 24, 8
SET = Gear(bits=2, group=4, outliers=0.1, rank=2, later=1, buffer=8)


def rows(dtype: torch.dtype = torch.float64, count: int = COUNT) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    numbers = torch.randn(HEADS, count, WIDTH, generator=random, dtype=torch.float64)
    numbers[1, :, 3] *= 20  # a large channel
    numbers[0, 5, 2] = 40  # and a large number
    return numbers.to(dtype)


def vector(numbers: list[float], form: Gear) -> tuple[list[float], set[int]]:
    """One that is rounded, without matrices, and the places of the numbers that are kept."""
    half = int(form.outliers * len(numbers) / 2 + 0.5)
    order = sorted(range(len(numbers)), key=lambda place: numbers[place])
    kept = {*order[:half], *order[len(order) - half :]}
    found = []
    for start in range(0, len(numbers), form.group):
        places = [p for p in range(start, start + form.group) if p not in kept]
        in_group = dict(zip(places, on_grid([numbers[p] for p in places], form.bits), strict=True))
        found += [in_group.get(p, numbers[p]) for p in range(start, start + form.group)]
    return found, kept


def both(form: Gear, place: int = 0, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that were stored and read."""
    recipe = Recipe(form)
    codes = recipe.encode_rows([rows(count=count)], [rows(count=count)], place)
    return recipe.decode_rows(codes[0], 0)


def test_grids_and_kept_numbers_against_a_loop() -> None:
    form = dataclasses.replace(SET, rank=0)
    keys, values = both(form)
    for head in range(HEADS):
        for channel in range(WIDTH):
            want, _ = vector(rows()[head, :, channel].tolist(), form)
            assert keys[head, :, channel].tolist() == pytest.approx(want, abs=1e-9)
    for token in range(COUNT):
        want, _ = vector(rows()[:, token].flatten().tolist(), form)
        assert values[:, token].flatten().tolist() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("place", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kept_numbers_are_exact_with_matrices_too(place: int, dtype: torch.dtype) -> None:
    recipe = Recipe(SET)
    numbers = rows(dtype)
    keys, values = recipe.decode_rows(recipe.encode_rows([numbers], [numbers], place)[0], 0)
    assert keys.dtype == values.dtype == dtype
    by_channel = extreme_places(numbers.transpose(1, 2).reshape(-1, COUNT), SET.outliers)
    kept = numbers.transpose(1, 2).reshape(-1, COUNT).gather(1, by_channel)
    assert by_channel.shape[1] == 2
    assert torch.equal(keys.transpose(1, 2).reshape(-1, COUNT).gather(1, by_channel), kept)
    by_token = extreme_places(numbers.transpose(0, 1).reshape(COUNT, -1), SET.outliers)
    kept = numbers.transpose(0, 1).reshape(COUNT, -1).gather(1, by_token)
    assert by_token.shape[1] == 2
    assert torch.equal(values.transpose(0, 1).reshape(COUNT, -1).gather(1, by_token), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_matrices_never_take_a_head_further_away(rank: int, dtype: torch.dtype) -> None:
    # Squares of the other heads' numbers vanish, or overflow.
    lost = torch.randn(3, 16, 8) * torch.tensor([1.0, 1e-30, 1e18])[:, None, None]
    left, right = thin_matrices(lost, rank, 3, seed=1, dtype=dtype)
    after = (lost - left.float() @ right.float().transpose(1, 2)).norm(dim=(1, 2))
    assert bool((after <= lost.norm(dim=(1, 2))).all())
    assert after[0] < lost[0].norm()


def test_matrices_find_what_has_their_rank() -> None:
    left, right = torch.randn(3, 20, 2).double(), torch.randn(3, 8, 2).double()
    lost = left @ right.transpose(1, 2)
    found = thin_matrices(lost, 2, 3, 7, torch.float64)
    assert torch.allclose(found[0] @ found[1].transpose(1, 2), lost, atol=1e-8)
    square = thin_matrices(torch.randn(1, 6, 8).double(), 9, 1, 7, torch.float64)
    assert square[0].shape == (1, 6, 6)


def test_corrections_bring_rows_nearer_one_by_one() -> None:
    away = []
    for form in (
        dataclasses.replace(SET, outliers=0, rank=0),
        dataclasses.replace(SET, rank=0),
        SET,
    ):
        away.append([float((found - rows()).norm()) for found in both(form)])
    for keys_or_values in zip(*away, strict=True):
        assert keys_or_values[0] > keys_or_values[1] > keys_or_values[2]


def test_all_numbers_kept_is_the_full_cache() -> None:
    for count in (8, 24):
        keys, values = both(dataclasses.replace(SET, outliers=1), count=count)
        assert torch.equal(keys, rows(count=count)) and torch.equal(values, rows(count=count))


@pytest.mark.parametrize("count", [4, 255, 256, 700])
def test_places_take_a_byte(count: int) -> None:
    places = torch.stack([torch.randperm(count)[: count // 2].sort().values for _ in range(5)])
    low, counts = in_segments(places, count)
    assert low.dtype == counts.dtype == torch.uint8
    assert torch.equal(from_segments(low, counts), places)
    assert counts.numel() == (0 if count <= 255 else 5 * -(-count // 255))


@pytest.mark.parametrize(("bits", "share"), [(4, 0.38), (2, 0.3)])
def test_bytes_are_those_of_the_card(bits: int, share: float) -> None:
    """Of heads as wide as SmolLM2's, a prompt of 2,048 tokens in bfloat16."""
    heads, count, width = 3, 2048, 64
    numbers = torch.randn(heads, count, width).bfloat16()
    codes = Recipe(Gear(bits=bits)).encode_rows([numbers], [numbers], 0)
    of_one = heads * count * width
    rounding = 2 * (of_one * bits // 8 + of_one // 64 * 4)
    matrices = 2 * 4 * heads * (count + width) * 2
    keys_kept = 2 * round(count * 0.01) * heads * width * 3 + heads * width * -(-count // 255)
    values_kept = 2 * round(heads * width * 0.01) * count * 3
    assert bytes_of(codes) == rounding + matrices + keys_kept + values_kept
    assert bytes_of(codes) <= share * 2 * of_one * 2


def test_blocks_are_read_together_as_one_by_one() -> None:
    recipe = Recipe(SET)
    codes = [
        recipe.encode_rows([rows(count=n)], [rows(count=n) + 1], n)[0] for n in (24, 8, 8, 16, 8)
    ]
    keys, values = recipe.decode_all(codes, 0)
    one_by_one = [recipe.decode_rows(code, 0) for code in codes]
    assert torch.equal(keys, torch.cat([k for k, _ in one_by_one], 1))
    assert torch.equal(values, torch.cat([v for _, v in one_by_one], 1))


def test_without_loss_the_text_is_the_full_caches() -> None:
    (want,) = run(target(), [PROMPT], None)
    (live,) = run(target(), [PROMPT], Gear(outliers=1, buffer=4))
    assert live.ctx.output == want.ctx.output
