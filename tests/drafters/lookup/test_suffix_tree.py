"""The suffix trie: its counts are those of looking at the texts, however they grow and are
forgotten.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.drafters.lookup import suffix_tree as suffix
from foretell.drafters.lookup.suffix_tree import Suffixes, Text

Parts = list[list[int]]


def brute(parts: Parts, words: Sequence[int]) -> int:
    """How often the words stand in the parts."""
    size = len(words)
    return sum(
        part[i : i + size] == list(words) for part in parts for i in range(len(part) - size + 1)
    )


def kept(trie: Suffixes) -> Parts:
    return [list(text.tokens[text.first :]) for text in trie.texts.values()]


def check(trie: Suffixes, longest: int) -> None:
    """Everything a text may be asked equals what looking at the texts gives."""
    parts = kept(trie)
    words = {
        tuple(part[i : i + m])
        for part in parts
        for m in range(1, trie.depth + 1)
        for i in range(len(part) - m + 1)
    }
    for word in words:
        assert trie.count(word) == brute(parts, word)
        assert trie.count([*word[:-1], 99]) == 0
    for text, part in zip(trie.texts.values(), parts, strict=True):
        want, others = [], 0
        for m in range(min(longest, len(part)), 0, -1):
            if (count := brute(parts, part[-m:]) - 1) > others:
                others = count
                want.append((m, count))
        found = list(trie.find_matches(text, longest))
        assert [(m, count) for m, count, _ in found] == want
        for m, _, place in found:
            total, steps = trie.successors_of(place)
            follows = {t: brute(parts, [*part[-m:], t]) for t in {t for p in parts for t in p}}
            assert {token: count for count, _, token, _ in steps} == {
                t: c for t, c in follows.items() if c
            }
            assert total == sum(follows.values())
            assert [step[:2] for step in steps] == sorted(
                (step[:2] for step in steps), reverse=True
            )
            alike = list(trie.common_run(place, 3))
            if isinstance(place[0], list):
                after = [
                    trie.texts[p >> suffix.BITS].tokens[(p & suffix.MASK) + place[1] :][:3]
                    for p in place[0]
                ]
                differs = [len(set(column)) > 1 for column in zip(*after, strict=False)]
                assert alike == list(after[0][: [*differs, True].index(True)])
            else:
                assert not alike
            few = trie.successors_of(place, 0.5)
            assert few == (total, [step for step in steps if step[0] >= 0.5 * total])


moves = st.lists(
    st.tuples(st.integers(-1, 3), st.lists(st.integers(0, 3), max_size=8)), max_size=24
)


@settings(max_examples=100, deadline=None)
@given(moves, st.sampled_from([1, 2, 8]), st.sampled_from([2, 4, 7]))
def test_counts_are_those_of_the_texts_as_they_grow_together_and_are_forgotten(
    moves: list[tuple[int, list[int]]], leaf: int, depth: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "LEAF", leaf)
        trie, texts, parts = Suffixes(depth), [Text() for _ in range(4)], dict[int, list[int]]()
        for which, tokens in moves:
            if which >= 0:
                trie.extend(texts[which], tokens)
                parts.setdefault(texts[which].key, []).extend(tokens)
            else:
                for _ in range(min(len(tokens), len(parts))):
                    trie.forget_oldest()
                    oldest = min(parts)
                    parts[oldest] = parts[oldest][1:]
                    if not parts[oldest]:
                        del parts[oldest]
            assert kept(trie) == [parts[key] for key in sorted(parts)]
        check(trie, depth - 1)
        while trie.texts:
            trie.forget_oldest()
        assert not trie.nbytes and not trie.root.inner and not trie.root.leaves


@pytest.mark.parametrize("period", [1, 2, 7, 30])
def test_counts_of_periodic_texts(period: int) -> None:
    trie, text = Suffixes(10), Text()
    trie.extend(text, [i % period for i in range(130)])
    trie.extend(Text(), [i % period for i in range(period // 2, 40)])
    check(trie, 5)
    for _ in range(60):
        trie.forget_oldest()
    trie.extend(text, [0, 1])
    check(trie, 5)


def test_a_tie_goes_to_what_stood_last() -> None:
    trie, text = Suffixes(8), Text()
    trie.extend(text, [1, 2, 1, 3, 1])
    ((m, count, place),) = trie.find_matches(text, 4)
    assert (m, count) == (1, 2) and [
        (many, token) for many, _, token, _ in trie.successors_of(place)[1]
    ] == [(1, 3), (1, 2)]


def test_only_matches_up_to_the_length_asked_for_are_given() -> None:
    trie, text = Suffixes(20), Text()
    trie.extend(text, [*range(12), *range(12)])
    for longest in (1, 5, 12, 19):
        assert [(m, count) for m, count, _ in trie.find_matches(text, longest)] == [
            (min(longest, 12), 1)
        ]


def test_it_keeps_to_its_bytes_and_forgets_the_oldest_first() -> None:
    draw, limit = random.Random(3), 40_000
    trie, flat = Suffixes(16, limit), list[int]()
    texts = [Text() for _ in range(30)]
    for text in texts:
        tokens = [draw.randrange(20) for _ in range(100)]
        flat += tokens
        trie.extend(text, tokens)
        assert trie.nbytes <= limit
    left = [token for part in kept(trie) for token in part]
    assert 100 < len(left) < len(flat) and left == flat[-len(left) :]
    trie.extend(texts[0], [1, 2, 3])
    assert kept(trie)[-1] == [1, 2, 3], "a text that was forgotten starts again"
    Suffixes(16, 1).extend(texts[1], [1, 2, 3])  # no room for anything, and no error


@pytest.mark.parametrize("kind", ["random", "few", "periodic"])
def test_the_estimate_of_memory_is_honest(kind: str) -> None:
    draw = random.Random(1)
    tokens = {
        "random": [draw.randrange(1000, 9000) for _ in range(1500)],
        "few": [1000 + draw.randrange(6) for _ in range(1500)],
        "periodic": [1000 + i % 30 for i in range(700)],
    }[kind]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        trie = Suffixes(32)
        trie.extend(Text(), tokens)
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 * real < trie.nbytes < 1.5 * real


def test_a_store_is_restored_with_all_its_counts() -> None:
    trie, text = Suffixes(6), Text()
    trie.extend(text, [1, 2, 3, 1, 2, 4, 1, 2])
    trie.extend(Text(), [2, 3, 1])
    trie.forget_oldest()
    tensors = trie.tensors()
    other = Suffixes(6, vocab=5)
    other.extend(busy := Text(), [4, 4, 4])
    other.restore(tensors)
    assert kept(other) == kept(trie) == [[2, 3, 1, 2, 4, 1, 2], [2, 3, 1]]
    check(other, 5)
    other.extend(busy, [2, 3])  # a request under way when the store was loaded
    assert kept(other)[-1] == [2, 3]
    check(other, 5)
    small = Suffixes(6, 1100)
    small.restore(tensors)
    assert 0 < small.nbytes <= 1100 and kept(small)[-1] == [2, 3, 1][-len(kept(small)[-1]) :]
    empty = Suffixes(6)
    assert {name: len(value) for name, value in empty.tensors().items()} == {
        "tokens": 0,
        "sizes": 0,
    }
    other.restore(empty.tensors())
    assert not other.texts and not other.nbytes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": None}, "'sizes' and 'tokens'"),
        ({"more": torch.zeros(1)}, "'sizes' and 'tokens'"),
        ({"tokens": torch.zeros(3)}, "tokens: torch.float32"),
        ({"sizes": torch.ones(1, 3, dtype=torch.int64)}, "sizes: torch.int64 of 2 dimensions"),
        ({"sizes": torch.tensor([2, 2])}, "add up to the 3 tokens"),
        ({"sizes": torch.tensor([3, 0])}, "at least 1"),
        (
            {"tokens": torch.tensor([0, 9, 1], dtype=torch.int32)},
            "tokens: from 0 to 9, not all of 0 to 8",
        ),
        ({"tokens": torch.tensor([0, -1, 1], dtype=torch.int32)}, "tokens: from -1 to 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_nothing_is_lost(
    change: dict[str, torch.Tensor], told: str
) -> None:
    trie = Suffixes(4, vocab=9)
    trie.extend(Text(), [1, 2])
    good = {"tokens": torch.tensor([0, 1, 8], dtype=torch.int32), "sizes": torch.tensor([2, 1])}
    with pytest.raises(ValueError, match=told):
        trie.restore(
            {name: value for name, value in {**good, **change}.items() if value is not None}
        )
    assert kept(trie) == [[1, 2]]
    trie.restore(good)
    assert kept(trie) == [[0, 1], [8]]
