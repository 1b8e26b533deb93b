"""Weights of tri-grams: learnt, bounded, saved and restored."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.drafters.lookup.trigrams import GAIN, KEEP, MOST, Trigrams

VOCAB = 8

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(texts)
def test_a_prompt_gives_every_pair_the_shares_of_its_successors(text: list[int]) -> None:
    store = Trigrams(VOCAB, 1 << 20)
    store.read_text(text)
    counts: dict[Any, Counter[int]] = {}
    for i in range(len(text) - 2):
        counts.setdefault((text[i], text[i + 1]), Counter())[text[i + 2]] += 1
    assert set(store.rows) == set(counts)
    for pair, row in counts.items():
        assert store.rows[pair] == pytest.approx({t: n / row.total() for t, n in row.items()})
    before = {pair: dict(row) for pair, row in store.rows.items()}
    store.read_text(text)
    assert store.rows == before, "a prompt read again adds nothing"


def test_of_too_many_successors_the_lightest_is_forgotten() -> None:
    store = Trigrams(99, 1 << 20)
    for token in range(KEEP):
        store.learn_gram((1, 2), token, 1.0 + (token != 5))
    store.learn_gram((1, 2), 50, GAIN)
    assert set(store.rows[1, 2]) == {*range(KEEP), 50} - {5} and store.cells == KEEP
    store.learn_gram((1, 2), 51, GAIN)
    assert 50 not in store.rows[1, 2], "now this was the lightest"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=60),
    st.integers(0, 4000),
)
def test_it_stays_within_its_bytes_and_forgets_what_was_met_longest_ago(
    grams: list[Any], limit: int
) -> None:
    store, wide = Trigrams(VOCAB, limit), Trigrams(VOCAB, 1 << 30)
    for a, b, c in grams:
        store.learn_gram((a, b), c, GAIN)
        wide.learn_gram((a, b), c, GAIN)
        assert store.nbytes <= limit or len(store.rows) == 1
        assert store.cells == sum(map(len, store.rows.values())) and (a, b) in store.rows
        assert list(store.rows) == list(wide.rows)[-len(store.rows) :]


def test_its_bytes_are_told_about_right() -> None:
    store, draw = Trigrams(1 << 20, 1 << 30), random.Random(0)
    for i in range(5000):
        for _ in range(1 + i % 4):
            store.learn_gram(
                (1000 + 2 * i, 1001 + 2 * i), draw.randrange(1000, 1 << 20), draw.random()
            )
    true = sys.getsizeof(store.rows)
    for pair, row in store.rows.items():
        true += sum(map(sys.getsizeof, [pair, *pair, row, *row, *row.values()]))
    assert 0.75 < store.nbytes / true < 1.33


@given(texts, st.integers(0, 9000))
def test_saved_and_restored_it_goes_on_as_before(text: list[int], limit: int) -> None:
    store, other = Trigrams(VOCAB, 1 << 20), Trigrams(VOCAB, limit)
    store.read_text(text)
    store.note_text(text[-16:])
    other.restore(store.tensors())
    assert (
        list(other.rows.items()) == list(store.rows.items())[-len(other.rows) :] or not store.rows
    )
    assert other.nbytes <= limit or len(other.rows) <= 1
    other.limit = 1 << 20
    if len(other.rows) == len(store.rows):
        for a in (store, other):
            a.note_text([0, 1, 2, 0, 1])
        assert list(other.rows.items()) == list(store.rows.items()) and other.nbytes == store.nbytes


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("trigrams", None, "trigrams is missing"),
        ("weights", None, "weights is missing"),
        ("weights", lambda x: x.float(), "weights .*not torch.float64"),
        ("trigrams", lambda x: x.int(), "trigrams .*not torch.int64"),
        ("weights", lambda x: x[:1], "trigrams .*shape"),
        ("trigrams", lambda x: x[:, :2], "not of shape"),
        ("trigrams", lambda x: x + 6, "beyond the vocabulary"),
        ("trigrams", lambda x: x - 9, "beyond the vocabulary"),
        ("weights", lambda x: x * torch.nan, "not all above 0"),
        ("weights", lambda x: x * 0, "not all above 0"),
        ("weights", lambda x: x + MOST, "at most"),
        ("trigrams", lambda x: x[:1].expand(3, -1), "one twice"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(
    name: str, change: Any, complaint: str
) -> None:
    store, other = Trigrams(VOCAB, 1 << 20), Trigrams(VOCAB, 1 << 20)
    store.read_text([1, 2, 3, 1, 2, 4])
    tensors = {k: v[:3] for k, v in store.tensors().items()}
    good = tensors.pop(name)
    if change is not None:
        tensors[name] = change(good)
    other.learn_gram((1, 2), 3, 1.0)
    with pytest.raises(ValueError, match=complaint):
        other.restore(tensors)
    assert other.rows == {(1, 2): {3: 1.0}} and other.cells == 1


def test_more_successors_than_are_kept_are_refused() -> None:
    grams = torch.tensor([[1, 2, token] for token in range(KEEP + 1)])
    with pytest.raises(ValueError, match="more than 12"):
        Trigrams(99, 1 << 20).restore(
            {"trigrams": grams, "weights": torch.ones(KEEP + 1, dtype=torch.float64)}
        )
