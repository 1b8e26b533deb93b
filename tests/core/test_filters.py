"""Filters keep the tokens that transformers' keep, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from foretell.core.filters import TopP
from foretell.native import library
from foretell.native import rows as native

SHARES = (0.0, 0.02, 0.3, 0.5, 0.9, 0.95, 0.999)


@given(
    st.integers(0, 9_999),
    st.integers(1, 3_000),
    st.floats(0.1, 8),
    st.sampled_from(SHARES),
    st.sampled_from((0, 2, 8)),
    st.booleans(),
)
def test_top_p_keeps_what_transformers_keeps(
    seed: int, width: int, spread: float, share: float, steps: int, banned: bool
) -> None:
    source = torch.Generator().manual_seed(seed)
    row = spread * torch.randn(width, generator=source)
    if steps:  # then many are equal
        row = (row * steps).round() / steps
    if banned:
        row = row.masked_fill(torch.rand(width, generator=source) < 0.7, -torch.inf)
        row[0] = 0.0
    before = row.clone()
    assert torch.equal(TopP(share)(None, row[None]), hf.TopPLogitsWarper(share)(None, row[None]))
    assert torch.equal(row, before)


def test_few_rows_are_sorted() -> None:
    if not library.is_available():
        pytest.skip("no C library")
    source = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(50):
        row = 4 * torch.randn(49_152, generator=source)
        kept = native.nucleus_logits(row, 0.9)
        if kept is not None:
            found += 1
            assert torch.equal(kept, hf.TopPLogitsWarper(0.9)(None, row[None])[0])
    assert found >= 45


def test_what_rounding_could_decide_is_left_to_sorting() -> None:
    if not library.is_available():
        pytest.skip("no C library")
    assert native.nucleus_logits(torch.zeros(10), 0.5) is None
    assert native.nucleus_logits(torch.tensor([1.0, torch.nan, 0.0]), 0.5) is None
    assert native.nucleus_logits(torch.full((4,), -torch.inf), 0.5) is None
    assert native.nucleus_logits(torch.tensor([0.75, 0.25]).log(), 0.75) is None
    kept = native.nucleus_logits(torch.tensor([0.5, 0.3, 0.2]).log(), 0.6)
    assert kept is not None and (kept > -torch.inf).tolist() == [True, True, False]


def test_several_rows_and_other_number_formats_are_sorted() -> None:
    rows = torch.randn(3, 40)
    want = hf.TopPLogitsWarper(0.7)(None, rows)
    assert torch.equal(TopP(0.7)(None, rows), want)
    double = torch.randn(1, 40, dtype=torch.float64)
    assert torch.equal(TopP(0.7)(None, double), hf.TopPLogitsWarper(0.7)(None, double))
