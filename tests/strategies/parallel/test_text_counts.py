"""Counts of n-grams in whole texts, against plain loops; bounded, saved and restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.strategies.parallel import text_counts
from foretell.strategies.parallel.text_counts import TextCounts, count_in_texts


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=14), max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
)
def test_counts_are_those_of_a_loop(texts: list[list[int]], context: list[int]) -> None:
    store = TextCounts(1)
    for text in texts:
        store.add(text)
    hits, totals = store.count(context, np.arange(5), 5)
    for n in range(5):
        follow = [
            t[i + n + 1]
            for t in texts
            for i in range(len(t) - n - 1)
            if t[i : i + n + 1] == context[-n - 1 :]
        ]
        follow = follow if n < len(context) else []
        assert totals[n] == len(follow) and hits[n].tolist() == [follow.count(t) for t in range(5)]


def test_the_latest_places_of_a_token_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_counts, "PLACES", 3)
    store = TextCounts(1)
    store.add([1, 2] * 9 + [1, 3])
    hits, totals = store.count([1], np.array([2, 3]), 5)
    assert totals[0] == 3 and hits[0].tolist() == [2, 1]


def test_a_store_is_bounded_and_the_oldest_goes_first() -> None:
    store = TextCounts(1)
    for first in range(25):
        store.add(list(range(100 * first, 100 * first + 100)) * 60)
        assert store.nbytes <= 1 << 20
    ids = np.arange(2500)
    assert store.count([2401], ids, 5)[1][0] > 9 and store.count([1], ids, 5)[1][0] == 0
    assert store.nbytes > 1 << 18
    store.add([7, 8] * 80_000)
    assert (
        store.nbytes <= 1 << 20
        and store.count([7], np.array([8]), 5)[0][0] == [4096]
        and store.tokens[0] == -1
    )


def test_a_store_goes_out_and_comes_back() -> None:
    store, other = TextCounts(1), TextCounts(1)
    for text in ([1, 2, 3, 1, 2], [], [4, 1, 2, 2]):
        store.add(text)
    other.restore(store.tensors())
    for a, b in zip(
        store.count([1, 2], np.arange(5), 5), other.count([1, 2], np.arange(5), 5), strict=True
    ):
        assert np.array_equal(a, b) and a.any()
    assert other.nbytes == store.nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        torch.tensor([-1, 2, -1]),
        torch.zeros(2, 2, dtype=torch.int32),
        [],
        [-1, 2],
        [2, -1],
        [-1, -2, -1],
    ],
)
def test_a_damaged_store_is_refused(wrong: Any) -> None:
    tensor = torch.tensor(wrong, dtype=torch.int32) if isinstance(wrong, list) else wrong
    with pytest.raises(ValueError, match="'tokens'"):
        TextCounts(1).restore({} if tensor is None else {"tokens": tensor})


def test_several_are_counted_together() -> None:
    one, two = TextCounts(1), TextCounts(1)
    one.add([1, 2, 1, 3])
    two.add([1, 2])
    hits, totals = count_in_texts([one, two], [1], np.array([2, 3]), 1)
    assert hits.tolist() == [[2, 1]] and totals.tolist() == [3]
