"""Rows in 8 bits: within half a step, and as they are where all numbers are one."""

from __future__ import annotations

import torch

from foretell.kv.select.coded import Coded, decode_rows, encode_rows


def test_rounding_is_within_half_a_step() -> None:
    rows = torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(0))
    codes, scales = encode_rows(rows)
    step = (rows.amax(-1) - rows.amin(-1)) / 255
    error = (decode_rows(codes, scales) - rows).abs().amax(-1)
    assert codes.dtype == torch.uint8 and bool((error <= 0.501 * step).all())
    assert bool((error > 0.3 * step).any())


def test_equal_numbers_stay() -> None:
    rows = torch.full((1, 2, 5), 0.3)
    assert decode_rows(*encode_rows(rows)).equal(rows)


def test_rows_may_follow_others() -> None:
    rows = torch.randn(2, 9, 4)
    parts = [Coded.from_rows(rows[:, part], -rows[:, part]) for part in (slice(4), slice(4, 9))]
    joined, whole = (
        parts[0].append_rows(parts[1]).read_rows(),
        Coded.from_rows(rows, -rows).read_rows(),
    )
    assert all(map(torch.equal, joined, whole))
