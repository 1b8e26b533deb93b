"""Pairs of layers: the direction between two, exact lengths, and who is left out."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.kv.store.layer_pairs import distant_tokens, merge_layers, restore_layer

T = 0.6


def rows(seed: int, count: int = 30, width: int = 12) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return 5 * torch.randn(2, count, width, generator=random, dtype=torch.float64)


def test_the_direction_lies_on_the_arc_where_the_share_says() -> None:
    shallow, deep = rows(0), rows(1)
    pair = merge_layers(shallow, deep, T)
    torch.testing.assert_close(pair.directions.norm(dim=-1), torch.ones(2, 30).double())
    for unit in range(2):
        for token in range(30):
            one, other = (part[unit, token] / part[unit, token].norm() for part in (shallow, deep))
            omega = math.acos(float(one @ other))
            e = pair.directions[unit, token]
            assert float(pair.angles[unit, token]) == pytest.approx(omega, abs=1e-12)
            assert math.acos(float(e @ one)) == pytest.approx(T * omega, abs=1e-12)
            assert math.acos(float(e @ other)) == pytest.approx((1 - T) * omega, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lengths_are_exact_whatever_direction_was_stored(dtype: torch.dtype) -> None:
    shallow, deep = rows(0).to(dtype), rows(1).to(dtype)
    pair = merge_layers(shallow, deep, T)
    stored = pair.directions.to(dtype) * 1.01  # rounded, and a little too long
    for layer, size in zip((shallow, deep), pair.sizes, strict=True):
        found = restore_layer(stored, size)
        wanted = layer.to(found.dtype).norm(dim=-1)
        eps = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.norm(dim=-1), wanted, rtol=8 * eps, atol=0)


def test_directions_that_are_the_same_come_back() -> None:
    shallow = rows(0)
    sizes = torch.rand(2, 30, 1).double() + 0.5
    deep = shallow * sizes
    pair = merge_layers(shallow, deep, T)
    torch.testing.assert_close(restore_layer(pair.directions, pair.sizes[0]), shallow)
    torch.testing.assert_close(restore_layer(pair.directions, pair.sizes[1]), deep)
    assert bool((pair.angles < 1e-7).all())
    near = merge_layers(shallow, deep + 1e-9 * rows(2), T)  # beside the line, where sines are small
    torch.testing.assert_close(
        restore_layer(near.directions, near.sizes[1]), deep, rtol=1e-7, atol=1e-7
    )


def test_rows_of_nothing_are_nothing() -> None:
    shallow, deep = rows(0), rows(1)
    shallow[0, 3] = 0
    deep[1, 4] = 0
    shallow[0, 5] = deep[0, 5] = 0
    pair = merge_layers(shallow, deep, T)
    one, other = (restore_layer(pair.directions, size) for size in pair.sizes)
    assert bool(one.isfinite().all()) and bool(other.isfinite().all())
    assert not one[0, 3].any() and not other[1, 4].any() and not one[0, 5].any()
    torch.testing.assert_close(other[0, 3], deep[0, 3])


def test_the_most_distant_are_left_out_by_a_share_of_the_range() -> None:
    angles = torch.tensor([[0.1, 0.2, 1.09, 1.05, 1.1, 0.6]], dtype=torch.float64)
    assert distant_tokens(angles, 0.05, "distant").tolist() == [
        [False, False, True, False, True, False]
    ]
    assert distant_tokens(angles, 0.05, "similar").tolist() == [
        [True, False, False, False, False, False]
    ]
    for rule in ("distant", "similar"):
        assert not distant_tokens(angles, 0, rule).any()
        assert distant_tokens(angles, 1, rule).all()
    two = torch.cat([angles, angles * 2])
    assert torch.equal(
        distant_tokens(two, 0.05, "distant")[1], distant_tokens(angles, 0.05, "distant")[0]
    )


def test_opposite_directions_are_always_left_out() -> None:
    shallow = rows(0)
    pair = merge_layers(shallow, -3 * shallow, T)
    assert (
        distant_tokens(pair.angles, 0, "distant").all()
        and distant_tokens(pair.angles, 0, "similar").all()
    )
