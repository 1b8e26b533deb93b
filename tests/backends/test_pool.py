"""Many caches in one memory: none touches another's rows, and what is dropped is used again."""

from __future__ import annotations

import gc
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.backends.pool import BLOCK, Pool, Segment

LAYOUT = ((2, 4, 4), (1, 4, 6), (2, 4, 4))
CPU = torch.device("cpu")


def pool(rows: int = 8 * BLOCK) -> Pool:
    made = Pool(LAYOUT, torch.float32, spare_rows=BLOCK)
    made.segment_rows = rows
    return made


def test_caches_of_a_pool_share_its_memory_and_no_row() -> None:
    it = pool()
    one, two = (it.cache_type(LAYOUT, torch.float32, CPU, 2 * BLOCK) for _ in range(2))
    assert len(it.segments) == 1
    for cache, value in ((one, 1.0), (two, 2.0)):
        for part in (*cache.k, *cache.v):
            part.fill_(value)
    assert [tuple(part.shape) for part in one.v] == [
        (2, 2 * BLOCK, 4),
        (1, 2 * BLOCK, 6),
        (2, 2 * BLOCK, 4),
    ]
    assert all(bool((part == 1).all()) for part in (*one.k, *one.v))
    whole = it.segments[0].keys[1]  # the two layers of two heads
    assert sorted(set(whole.reshape(-1).tolist())) == [0.0, 1.0, 2.0]
    assert not bool(whole[:, : 2 * BLOCK].any()), "what is spared"


def test_blocks_of_a_head_lie_where_the_runtime_looks_for_them() -> None:
    it = pool()
    cache = it.cache_type(LAYOUT, torch.float32, CPU, 2 * BLOCK)
    cache.k[0][1, BLOCK + 3] = 7.0  # of the second head, in its second block
    block = (2 * cache.lease.low + (cache.lease.high - cache.lease.low)) // BLOCK + 1
    assert bool((it.segments[0].keys[1][0].view(-1, BLOCK, 4)[block, 3] == 7).all())


def test_a_cache_that_grows_keeps_its_rows_and_gives_the_old_ones_back() -> None:
    it = pool()
    cache = it.cache_type(LAYOUT, torch.float32, CPU, BLOCK)
    cache.length = cache.base = 5
    cache.k[0][:, :5] = 3.0
    cache.reserve(BLOCK + 1)
    assert cache.capacity == 2 * BLOCK and bool((cache.k[0][:, :5] == 3).all())
    assert it.segments[0].sorted_free == [(BLOCK, 2 * BLOCK), (4 * BLOCK, 8 * BLOCK)]
    twin = cache.fork()
    del cache
    assert it.segments[0].sorted_free == [(BLOCK, 2 * BLOCK), (4 * BLOCK, 8 * BLOCK)], (
        "the twin has them still"
    )
    del twin
    gc.collect()
    assert it.segments[0].sorted_free == [(BLOCK, 8 * BLOCK)]


def test_a_full_pool_gets_another_segment_and_drops_one_without_caches() -> None:
    it = pool(3 * BLOCK)
    caches = [it.cache_type(LAYOUT, torch.float32, CPU, BLOCK) for _ in range(3)]
    assert [len(s.sorted_free) for s in it.segments] == [0, 1]
    large = it.cache_type(LAYOUT, torch.float32, CPU, 16 * BLOCK)
    assert len(it.segments) == 3 and large.k[0].shape == (2, 16 * BLOCK, 4)
    del caches, large
    gc.collect()
    it.cache_type(LAYOUT, torch.float32, CPU, 32 * BLOCK)
    assert len(it.segments) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 99)), max_size=30))
def test_ranges_are_disjoint_and_all_comes_back(moves: list[tuple[bool, int, int]]) -> None:
    segment, taken = Segment(LAYOUT, torch.float32, 20, 1), list[tuple[int, int]]()
    for take, size, which in moves:
        if take:
            low = segment.take_rows(size)
            assert low >= 0 or all(high - low < size for low, high in segment.sorted_free)
            taken += [(low, low + size)] if low >= 0 else []
        elif taken:
            segment.give_back(*taken.pop(which % len(taken)))
        rows = sorted([*taken, *segment.sorted_free])
        assert sum(high - low for low, high in rows) == 19
        assert all(a[1] <= b[0] for a, b in pairwise(rows))
        assert all(a[1] < b[0] for a, b in pairwise(segment.sorted_free)), "neighbours are joined"
    for piece in taken:
        segment.give_back(*piece)
    assert segment.sorted_free == [(1, 20)]
