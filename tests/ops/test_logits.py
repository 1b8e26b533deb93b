"""The best entries of rows against sorting all of them, and memory that holds zeros."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.native import library
from foretell.ops import logits as rows


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 1000, 8192, 1 << 14, (1 << 14) + 1, 50257])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_best_of_every_row_and_where_they_stand(width: int, count: int) -> None:
    block = torch.randn(count, width, generator=torch.Generator().manual_seed(width + count))
    for k in (1, 8, 70):
        values, places = rows.best_logits(block, k)
        want = block.sort(descending=True)
        assert values.shape == places.shape == (count, min(k, width))
        assert torch.equal(values, want.values[:, :k]) and torch.equal(places, want.indices[:, :k])


@given(st.integers(0, 99), st.integers(1, 300), st.integers(1, 9))
def test_equals_are_told_apart_and_infinite_ones_are_values(seed: int, width: int, k: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MANY", 1)
        block = (
            torch.randint(0, 4, (3, width), generator=torch.Generator().manual_seed(seed))
            .double()
            .log()
        )
        values, places = rows.best_logits(block, k)
    assert torch.equal(values, block.sort(descending=True).values[:, :k])
    assert torch.equal(block.gather(1, places), values)
    assert all(len(set(row)) == len(row) for row in places.tolist())


@given(st.integers(0, 99), st.integers(1, 300), st.integers(1, 9), st.sampled_from((0, -1, 3)))
def test_the_library_reads_rows_as_torch_does(seed: int, width: int, k: int, above: int) -> None:
    source = torch.Generator().manual_seed(seed)
    wide = torch.randint(-2, 4, (3, width + 5), generator=source).float() - above
    block = torch.where(wide == -2 - above, -torch.inf, wide)[:, 2 : 2 + width]
    k = min(k, width)
    want = block.sort(descending=True, stable=True)
    values, places, log_sums = rows.best_and_log_sums(block, k)
    assert torch.equal(values, want.values[:, :k])
    assert torch.equal(block.gather(1, places), values)
    assert torch.allclose(log_sums, block.logsumexp(-1), atol=1e-5)
    if library.is_available():
        assert torch.equal(places, want.indices[:, :k])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "is_available", lambda: False)
        same, _, sums = rows.best_and_log_sums(block, k)
    assert torch.equal(same, values)
    assert torch.allclose(log_sums, sums, atol=1e-5)


def test_the_likeliest_token_has_its_chance():
    row = torch.randn(49_152)
    token, chance = rows.likeliest_token(row)
    assert token == int(row.argmax())
    assert chance == pytest.approx(float(row.softmax(-1).max()), rel=1e-5)
    assert math.isnan(rows.likeliest_token(torch.full((20,), -torch.inf))[1])
    assert rows.likeliest_token(torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64))[0] == 1


def test_rows_that_are_no_numbers_end_in_a_place_of_the_row():
    block = torch.full((2, 200), torch.nan)
    block[1, 3] = 1.0
    values, places, _ = rows.best_and_log_sums(block, 4)
    assert bool(((places >= 0) & (places < 200)).all()) and bool(values.isnan().any())


def test_firsts_are_the_best_and_of_equals_the_lowest():
    block = torch.randn(7, 33)
    block[2] = 0
    block[3, 5] = block[3, 30] = 100
    assert rows.best_token_ids(block) == [int(row.argmax()) for row in block]
    assert rows.best_token_ids(block)[2:4] == [0, 5]
    assert rows.best_token_ids(block[:0]) == []
    assert rows.best_token_ids(block.double()) == rows.best_token_ids(block)
    block[1] = -torch.inf
    block[4, 7] = torch.nan
    want = [int(row.argmax()) for row in block]
    want[1] = want[4] = -1
    assert rows.best_token_ids(block) == want


def test_zeros_are_what_torch_s_are():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        made = rows.zero_memory((2, 3, 5, 7), dtype, torch.device("cpu"))
        assert torch.equal(made, torch.zeros(2, 3, 5, 7, dtype=dtype))
        assert made.dtype == dtype
        assert made.is_contiguous()
        made[0, 1, 2] = 1
        assert int(made.sum()) == 7


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9))
def test_texts_one_after_the_other_are_tensors_of_their_own(texts: list[list[int]]) -> None:
    ids = rows.Ids()
    found = [ids.ids_of(list(text)) for text in texts]
    assert [one.tolist() for one in found] == [[text] for text in texts]
    assert all(
        one.dtype is torch.long and one.shape == (1, len(text))
        for one, text in zip(found, texts, strict=True)
    )
    assert copy.deepcopy(ids).ids_of([5]).tolist() == [[5]]


@pytest.mark.parametrize("width", [1, 7, 300, 49152])
def test_what_is_not_allowed_has_no_score(width: int) -> None:
    source = torch.Generator().manual_seed(width)
    scores = torch.randn(width, generator=source)
    allowed = torch.rand(width, generator=source) < 0.5
    for given_scores, mask in ((scores, allowed), (scores.double(), allowed), (scores, ~~allowed)):
        kept = given_scores.clone()
        masked = rows.mask_scores(given_scores, mask)
        assert torch.equal(masked, given_scores.where(mask, -math.inf))
        assert torch.equal(given_scores, kept), "it was written into"
    for wrong in (allowed[:-1], torch.ones(width + 2, dtype=torch.bool), allowed.float()):
        with pytest.raises(RuntimeError):
            rows.mask_scores(torch.zeros(width + 1), wrong)
    spread = torch.stack((scores, scores), 1)[:, 0]
    assert torch.equal(rows.mask_scores(spread, allowed), scores.where(allowed, -math.inf))
