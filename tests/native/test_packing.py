"""Matrices come back from their packed form, and little is lost by rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.native.packing import (
    BLOCK,
    FLOATS,
    GROUP,
    Packed,
    group_minima,
    group_scales,
    pack_floats,
    pack_whole,
    unpack_matrix,
    unpack_numbers,
)
from foretell.native.rounding import CHUNK, DTYPES, Peaks, best_peaks, quantize_matrix

SIZES = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 5, 6, 8]),
    SIZES,
    st.integers(1, 4),
    st.sampled_from([16, 32, 64]),
    st.booleans(),
    st.integers(0, 999),
)
def test_numbers_scales_and_minima_come_back(
    bits: int, outputs: int, pairs: int, group: int, has_minima: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = 64 * pairs
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = torch.rand(outputs, inputs // group, generator=generator).half()
    minima = torch.rand(scales.shape, generator=generator).half() - 1 if has_minima else None
    packed = pack_whole(numbers, bits, group, scales, minima, offset=3)
    if group >= GROUP or bits in (2, 3, 6):
        packed.check()
    assert packed.weights.dtype == torch.uint8 and packed.weights.ndim == 1
    assert packed.blocks == -(-outputs // BLOCK) and packed.inputs == inputs
    assert torch.equal(unpack_numbers(packed), numbers)
    assert torch.equal(group_scales(packed), scales.float())
    found = group_minima(packed)
    assert found is None if minima is None else torch.equal(found, minima.float())
    padded = packed.blocks * BLOCK * packed.inputs
    halves = 2 * padded // group * (1 if minima is None else 2)
    assert packed.nbytes == padded * bits // 8 + halves


@settings(max_examples=20, deadline=None)
@given(SIZES, st.integers(1, 3))
def test_floats_come_back_as_they_were(outputs: int, groups: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.randn(outputs, groups * GROUP).to(dtype)
        packed = pack_floats(weight)
        packed.check()
        assert torch.equal(unpack_matrix(packed), weight)
        assert packed.scales is None and packed.minima is None


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(2, 100), st.sampled_from([0.05, 1.0, 100.0]), st.integers(0, 99))
def test_rounding_to_8_bits_is_by_half_a_scale(
    outputs: int, inputs: int, size: float, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(outputs, inputs) * size
    packed = quantize_matrix(weight, "int8")
    scale = group_scales(packed).repeat_interleave(GROUP, 1)
    lost = (unpack_matrix(packed)[:, :inputs] - weight).abs()
    # The largest of a group may lie beyond 127 of a scale that float16 rounded down.
    assert (lost <= scale[:, :inputs] * 0.57).all()
    assert not unpack_matrix(packed)[:, inputs:].any(), "what fills a group up is zero"


def lost(weight: torch.Tensor, peaks: Peaks) -> float:
    return float((unpack_matrix(quantize_matrix(weight, "int8", peaks)) - weight).square().mean())


def always(peak: int, groups: torch.Tensor) -> torch.Tensor:
    return torch.full(groups.shape[:-1], peak)


def test_the_peak_of_a_group_is_the_best_of_all() -> None:
    """Of any weights it loses no more than 127 does, and of those that had 4 bits a third."""
    torch.manual_seed(0)
    steps = torch.randint(0, 16, (64, 8, GROUP)) * torch.rand(64, 8, 1)
    once_4_bits = (steps + torch.randn(64, 8, 1)).flatten(1)
    for weight, most in ((torch.randn(64, 8 * GROUP), 0.95), (once_4_bits, 0.4)):
        simple = lost(weight, partial(always, 127))
        assert lost(weight, best_peaks) < most * simple
        for peak in (127, 110, 96):
            fixed = quantize_matrix(
                weight, "int8", lambda groups, p=peak: torch.full(groups.shape[:-1], p)
            )
            by_peak = (unpack_matrix(fixed) - weight).square().unflatten(1, (-1, GROUP)).sum(-1)
            best = unpack_matrix(quantize_matrix(weight, "int8")) - weight
            # The scale is rounded to float16 after the choice.
            allowed = 1.02 * by_peak + 1e-6
            assert (best.square().unflatten(1, (-1, GROUP)).sum(-1) <= allowed).float().mean() > 0.9


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_rounding_to_4_bits_fits_scale_and_minimum_to_a_group(offset: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 5 * GROUP) + offset
    ours = unpack_matrix(quantize_matrix(weight, "int4"))
    groups = weight.view(48, -1, GROUP)
    low = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - low) / 15
    simple = (((groups - low) / scale).round() * scale + low).flatten(1)
    assert (ours - weight).square().mean() < 0.95 * (simple - weight).square().mean()
    assert (ours - weight).abs().max() <= 1.5 * scale.max()


@pytest.mark.parametrize("format", DTYPES)
def test_groups_without_a_range_lose_next_to_nothing(format: str) -> None:
    weight = torch.zeros(17, 2 * GROUP)
    weight[3, GROUP:] = -2.0
    ours = unpack_matrix(quantize_matrix(weight, format)).float()
    assert torch.allclose(ours, weight, rtol=2**-11, atol=0)  # a scale is of float16


@pytest.mark.parametrize("format", FLOATS)
def test_floats_are_packed_as_they_are(format: str) -> None:
    """A router's matrix is of float32 beside layers of any format: near ties decide there."""
    weight = torch.randn(17, 2 * GROUP).to(FLOATS[format])
    assert torch.equal(unpack_matrix(quantize_matrix(weight, format)), weight)


def test_a_format_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="'int3'"):
        quantize_matrix(torch.zeros(16, GROUP), "int3")


def test_4_bits_without_minima_are_around_zero() -> None:
    whole = torch.arange(32, dtype=torch.uint8).view(1, 32) % 16
    packed = pack_whole(whole, 4, GROUP, torch.full((1, 1), 0.5), offset=8)
    assert torch.equal(unpack_matrix(packed), (whole.float() - 8) / 2)


@pytest.mark.parametrize("format", DTYPES)
def test_parts_share_the_memory_of_what_was_joined(format: str) -> None:
    torch.manual_seed(0)
    parts = [quantize_matrix(torch.randn(n, 64), format) for n in (16, 48, 21)]
    joined = Packed.join(parts)
    assert torch.equal(unpack_matrix(joined), torch.cat([unpack_matrix(part) for part in parts]))
    first, second = joined.split([16, 48])
    assert torch.equal(unpack_matrix(second), unpack_matrix(parts[1]))
    assert first.weights.data_ptr() == joined.weights.data_ptr()
    assert second.weights.data_ptr() == joined.weights.data_ptr() + len(first.weights)
    if joined.scales is not None and second.scales is not None:
        assert second.scales.data_ptr() == joined.scales[1:].data_ptr()
    with pytest.raises(AssertionError, match="cannot be divided"):
        joined.split([20])


def test_large_matrices_are_quantized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(70, 64)
    whole = quantize_matrix(weight, "int4")
    assert weight.numel() < CHUNK
    monkeypatch.setattr("foretell.native.rounding.CHUNK", 1)
    parts = quantize_matrix(weight, "int4")
    assert parts.outputs == 70 and torch.equal(unpack_matrix(parts), unpack_matrix(whole))
