"""The means after n-grams: how they are taken, bounded, kept on disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from struct import unpack_from
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.drafters.lookup.ngram_means import Gram, NgramMeans

VOCAB = 6


def memory(n: int = 4, k: int = 3, vocab: int = VOCAB, limit: int = 1 << 20) -> NgramMeans:
    return NgramMeans(n, k, vocab, limit)


def learn(store: NgramMeans, gram: Gram, ids: Sequence[int], probs: Sequence[float]) -> None:
    store.learn_row(store.table.snapshot(), gram, ids, probs)


def known(store: NgramMeans) -> list[Gram]:
    """The n-grams, the one met longest ago first."""
    return list(store.table.entries)


def entry(store: NgramMeans, *gram: int) -> dict[int, float]:
    row = store.table.get(gram)
    assert row is not None
    ids, probs = store.unpack_row(row)
    return dict(zip(ids.tolist(), probs.tolist(), strict=True))


def count(store: NgramMeans, gram: Gram) -> int:
    """The rows that its mean was taken over."""
    row = store.table.get(gram)
    assert row is not None
    return int(unpack_from("<i", row)[0])


def test_a_token_absent_from_a_row_decays() -> None:
    store = memory(k=4, vocab=9)
    learn(store, (1, 2), [0, 1, 2, 3], [0.7, 0.2, 0.05, 0.0])
    learn(store, (1, 2), [1, 0, 4, 5], [0.6, 0.3, 0.05, 0.0])
    assert entry(store, 1, 2) == pytest.approx({0: 0.5, 1: 0.4, 2: 0.025, 4: 0.025})
    learn(store, (1, 2), [7, 8, 0, 1], [0.6, 0.3, 0.0, 0.0])
    assert entry(store, 1, 2) == pytest.approx({0: 1 / 3, 1: 0.8 / 3, 7: 0.2, 8: 0.1})
    probs = store.unpack_row(store.table.get((1, 2)))[1].tolist()
    assert probs == sorted(probs, reverse=True)


Rows = list[tuple[tuple[int, ...], list[float]]]
grams = st.lists(st.integers(0, 2), min_size=2, max_size=4).map(tuple)
rows = st.lists(st.tuples(grams, st.permutations(range(1, VOCAB + 1))), max_size=20)


def best(weights: Sequence[float], k: int) -> tuple[list[int], list[float]]:
    order = sorted(range(len(weights)), key=lambda t: -weights[t])[:k]
    return order, [weights[t] / sum(weights) for t in order]


@given(rows)
def test_with_room_for_every_token_a_mean_is_the_mean(seen: Rows) -> None:
    store = memory(k=VOCAB)
    for gram, weights in seen:
        learn(store, gram, *best(weights, VOCAB))
    for gram in {gram for gram, _ in seen}:
        all_rows = [[w / sum(weights) for w in weights] for g, weights in seen if g == gram]
        means = {t: sum(row[t] for row in all_rows) / len(all_rows) for t in range(VOCAB)}
        assert entry(store, *gram) == pytest.approx(means, abs=1e-5)
        assert count(store, gram) == len(all_rows)


@given(rows, st.integers(1, 9))
def test_the_one_met_longest_ago_gives_way(seen: Rows, room: int) -> None:
    store, wide = memory(), memory()
    store.table.capacity = room
    for gram, weights in seen:
        learn(store, gram, *best(weights, 3))
        learn(wide, gram, *best(weights, 3))
        assert known(store) == known(wide)[-room:]
    last = {gram: i for i, (gram, _) in enumerate(seen)}
    assert known(wide) == sorted(last, key=last.__getitem__)


def test_it_stays_within_its_bytes() -> None:
    for limit in (1, 5_000, 40_000):
        store = memory(limit=limit, vocab=1000, k=10)
        for i in range(300):
            learn(store, (i, i + 1), range(10), [0.1] * 10)
            assert store.nbytes <= limit or len(store.table) == 1
        assert known(store)[-1] == (299, 300)
        assert len(store.table) == min(300, store.table.capacity)


def test_its_bytes_are_told_about_right() -> None:
    store = memory(limit=1 << 30, vocab=100_000, k=10)
    for i in range(5000):
        learn(store, tuple(range(9 * i + 1000, 9 * i + 1002 + i % 3)), range(10), [0.1] * 10)
    true = sys.getsizeof(store.table.entries)
    for gram, entry in store.table.entries.items():
        true += sys.getsizeof(gram) + sum(map(sys.getsizeof, gram))
        true += sys.getsizeof(entry) + sys.getsizeof(entry.value)
    assert 0.75 < store.nbytes / true < 1.33


@given(rows, st.integers(1, 30))
def test_saved_and_restored_it_goes_on_as_before(seen: Rows, room: int) -> None:
    store, other = memory(), memory()
    for gram, weights in seen:
        learn(store, gram, *best(weights, 3))
    other.table.capacity = room
    other.restore(store.tensors())
    assert known(other) == known(store)[-room:]
    if room >= len(store.table):
        for both in (store, other):
            learn(both, (0, 0), [1, 2, 3], [0.5, 0.25, 0.125])
    for gram in known(other):
        assert entry(other, *gram) == entry(store, *gram)
        assert count(other, gram) == count(store, gram)
    assert list(other.tensors()) == ["grams", "ids", "probs", "counts"]


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("grams", None, "grams is missing"),
        ("counts", None, "counts is missing"),
        ("ids", lambda x: x.long(), "ids .*not torch.int32"),
        ("probs", lambda x: x[:, :2], "probs .*shape"),
        ("grams", lambda x: x[:1], "not of shape"),
        ("grams", lambda x: x.flatten(), "grams .*shape"),
        ("grams", lambda x: x + 4, "no n-gram"),
        ("grams", lambda x: x.flip(-1), "no n-gram"),
        ("grams", lambda x: x - 3, "no n-gram"),
        ("grams", lambda x: x[:1].expand(2, -1), "twice"),
        ("ids", lambda x: x + 4, "beyond the vocabulary"),
        ("ids", lambda x: x * 0, "a token twice"),
        ("probs", lambda x: x * torch.nan, "not probabilities"),
        ("probs", lambda x: x * 9, "not probabilities"),
        ("probs", lambda x: x.flip(-1), "not best first"),
        ("counts", lambda x: x * 0, "not positive"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(
    name: str, change: Any, complaint: str
) -> None:
    store = memory()
    learn(store, (0, 1), [0, 1, 2], [0.5, 0.3, 0.1])
    learn(store, (0, 1, 2, 3), [3, 1, 2], [0.6, 0.2, 0.1])
    tensors = store.tensors()
    good = tensors.pop(name)
    if change is not None:
        tensors[name] = change(good)
    before = memory()
    learn(before, (5, 5), [5, 4, 3], [0.5, 0.3, 0.1])
    with pytest.raises(ValueError, match=complaint):
        before.restore(tensors)
    assert known(before) == [(5, 5)] and entry(before, 5, 5) == pytest.approx(
        {5: 0.5, 4: 0.3, 3: 0.1}
    )


def test_two_requests_average_each_what_it_saw_and_the_memory_takes_in_both() -> None:
    store = memory(k=2, vocab=4)
    learn(store, (1, 2), [0, 1], [0.5, 0.25])
    one, two = store.table.snapshot(), store.table.snapshot()
    store.learn_row(one, (1, 2), [0, 1], [1.0, 0.0])
    store.learn_row(two, (1, 2), [1, 0], [0.75, 0.25])
    for seen, want in ((one, {0: 0.75, 1: 0.125}), (two, {1: 0.5, 0: 0.375})):
        row = store.find_row(seen, [3, 1, 2])
        assert row is not None
        ids, probs = store.unpack_row(row)
        assert dict(zip(ids.tolist(), probs.tolist(), strict=True)) == pytest.approx(want)
    assert entry(store, 1, 2) == pytest.approx({0: 1.75 / 3, 1: 1.0 / 3})
    assert count(store, (1, 2)) == 3
