"""Elastic Cache against loops over transformers' own attention, and its counts of rows."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
import torch

from foretell.kv.base import NEVER
from foretell.kv.evict.elastic_cache import Elastic, ElasticCache, merged_means
from tests.kv.policies import PROMPT, target
from tests.kv.twin import Rows, Twin, by_engine, by_loops, same

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "elastic-cache:ratio=0.3,distance=-5,every=5"
LARGE_SPEC = "elastic-cache:ratio=0"

TOKENS = 16


def nearest(row: int, free: list[int]) -> int:
    return min(free, key=lambda other: (abs(other - row), other))


class Loops(Twin):
    """Deletes token by token, which is the paper's way. `slip` names a mistake."""

    def __init__(self, kv: ElasticCache, slip: str = "") -> None:
        self.kv, self.slip = kv, slip
        self.merged = 0

    def change(self, length: int, prompt: int, rows: Rows, weights: list[torch.Tensor]) -> None:
        should = ceil(round(length * (1 - self.kv.ratio), 9))
        many = rows[0][0].shape[1] - should
        for layer, pair in enumerate(rows):
            if length == prompt and many:
                self.merge(pair, weights[layer].mean(0).sum(0).tolist(), many)
            elif many:
                rest = ceil(round(prompt * (1 - self.kv.ratio), 9))
                place = self.kv.distance if self.kv.distance > 0 else rest + self.kv.distance
                place = max(self.kv.start, min(place, rest - 1)) + (self.slip == "next place")
                for part in (0, 1):
                    pair[part] = torch.cat(
                        [pair[part][:, :place], pair[part][:, place + many :]], 1
                    )

    def merge(self, pair: list[torch.Tensor], scores: list[float], many: int) -> None:
        count = len(scores)
        middle = range(self.kv.start, count - 1)
        order = sorted(middle, key=lambda row: (scores[row], row))
        if self.slip == "order for rank":  # of the published code
            thrown = [row for row, place in zip(middle, order, strict=True) if place <= many]
            thrown = thrown[:many]
        else:
            thrown = sorted(order[:many])
        free = sorted(set(middle) - set(thrown))
        kept = [*range(self.kv.start), *free, count - 1]
        anchors = {row: nearest(row, free) for row in thrown}
        if self.slip == "unmerged":
            anchors = {}
        self.merged += len(anchors)
        for part in (0, 1):
            made = []
            for row in kept:
                group = [row, *(other for other in thrown if anchors.get(other) == row)]
                made.append(pair[part][:, group].mean(1))
            pair[part] = torch.stack(made, 1)


@pytest.mark.parametrize("distance", [-5, 3])
@pytest.mark.parametrize(("ratio", "start"), [(0.2, 1), (0.35, 2)])
def test_it_holds_the_rows_that_loops_make(ratio: float, start: int, distance: int) -> None:
    kv = ElasticCache(ratio, start, distance)
    output, held = by_engine(kv, PROMPT, TOKENS)
    twin = Loops(kv)
    assert same(held, by_loops(twin, PROMPT, output))
    assert twin.merged == 3 * int(ratio * len(PROMPT))


@pytest.mark.parametrize("slip", ["order for rank", "unmerged", "next place"])
def test_a_slip_is_noticed(slip: str) -> None:
    kv = ElasticCache(distance=-5)
    output, held = by_engine(kv, PROMPT, TOKENS)
    assert not same(held, by_loops(Loops(kv, slip), PROMPT, output))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("rows", "many", "start"), [(40, 8, 1), (41, 30, 3), (9, 6, 1), (12, 1, 0)]
)
def test_anchors_are_the_nearest_kept_rows(seed: int, rows: int, many: int, start: int) -> None:
    torch.manual_seed(seed)
    scores = torch.rand(rows)
    kept, thrown, anchors = Elastic(start=start).classify_rows(scores, many)
    assert len(thrown) == many and sorted([*kept.tolist(), *thrown.tolist()]) == list(range(rows))
    free = [row for row in kept.tolist() if start <= row < rows - 1]
    assert len(kept) == len(free) + start + 1
    assert max(scores[thrown]) <= min(scores[free])
    for row, anchor in zip(thrown.tolist(), anchors.tolist(), strict=True):
        assert kept[anchor] == nearest(row, free)


def test_equal_rows_merge_to_themselves_and_others_stay_as_they_are() -> None:
    rows = torch.randn(2, 6, 4, dtype=torch.bfloat16)
    others = rows[:, [2, 2, 5]]
    assert torch.equal(merged_means(rows, others, torch.tensor([2, 2, 5])), rows)
    moved = merged_means(rows, others + 1, torch.tensor([2, 2, 5]))
    stay = [0, 1, 3, 4]
    assert torch.equal(moved[:, stay], rows[:, stay]) and not torch.equal(moved, rows)


def test_means_are_taken_in_32_bits() -> None:
    """In 16 bits 256 + 1 is 256."""
    rows = torch.full((1, 1, 1), 256.0, dtype=torch.bfloat16)
    others = torch.ones(1, 255, 1, dtype=torch.bfloat16)
    into = torch.zeros(255, dtype=torch.long)
    assert float(merged_means(rows, others, into)) == pytest.approx(511 / 256, rel=1 / 256)


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.25, 0.7])
@pytest.mark.parametrize("prompt", [1, 5, 30, 107])
def test_rows_are_a_share_of_the_text_at_every_length(ratio: float, prompt: int) -> None:
    policy = ElasticCache(ratio).build_policy(target())
    policy.begin_text(prompt)
    length = rows = 0
    changes = []
    while length < 400:
        room = policy.room_left(length)
        assert room >= 1
        for left in reversed(range(room)):
            length, rows = length + 1, rows + 1
            if left and length > prompt:
                assert rows == max(ceil(round(length * (1 - ratio), 9)), min(length, 3))
        rows = length - policy.count_gone(length)
        changes.append(length)
    gaps = [after - before for before, after in pairwise(changes) if before > max(prompt, 20)]
    assert {int(1 / ratio), ceil(1 / ratio)} >= set(gaps)


@pytest.mark.parametrize("every", [4, 7, 32])
def test_rows_that_are_deleted_together_are_those_of_one_by_one(every: int) -> None:
    """At the lengths where they are."""
    policy = ElasticCache(every=every).build_policy(target())
    policy.begin_text(30)
    assert policy.room_left(11) == 19
    length = 30
    while length < 300:
        gone = policy.count_gone(length)
        room = policy.room_left(length)
        for piece in range(length, length + room):
            assert policy.room_left(piece) == length + room - piece
        length += room
        assert (length - 30) % every == 0 and policy.count_gone(length) > gone
        assert policy.count_gone(length) == length - ceil(length * 4 / 5)


def test_together_or_one_by_one_the_same_rows_are_left() -> None:
    model = target()

    class Held:
        layout = model.layout
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.length, self.base = 30, 24  # a fifth was merged
            self.rows = list(range(24))

        def keep_rows(self, chosen: list[torch.Tensor]) -> None:
            self.rows = [self.rows[row] for row in chosen[0][0].tolist()]
            self.base = len(self.rows)

    left = []
    for every in (1, 10):
        policy = ElasticCache(distance=-9, every=every).build_policy(model)
        policy.begin_text(30)
        cache = Held()
        while cache.length < 60:
            room = policy.room_left(cache.length)
            cache.rows = [*cache.rows, *range(cache.length, cache.length + room)]
            cache.length, cache.base = cache.length + room, cache.base + room
            policy.change_rows(cache)
        left.append(cache.rows)
    assert left[0] == left[1] and len(left[0]) == 48


def test_a_prompt_of_few_tokens_keeps_the_protected_ones() -> None:
    for prompt in range(1, 8):
        _, held = by_engine(ElasticCache(0.5, start=4), PROMPT[:prompt], 5)
        assert all(rows[0][0].shape[1] >= min(at, 6) for at, rows in held.items())


def test_a_ratio_of_nothing_is_bit_equal() -> None:
    policy = ElasticCache(ratio=0.0).build_policy(target())
    policy.begin_text(9)
    assert policy.room_left(9) == NEVER and not policy.counts_token(3)
    output, held = by_engine(ElasticCache(ratio=0.0), PROMPT, TOKENS)
    want, whole = by_engine(None, PROMPT, TOKENS)
    assert output == want and len(held.keys() & whole.keys()) > 8
    for at in held.keys() & whole.keys():
        for ours, full in zip(held[at], whole[at], strict=True):
            assert all(map(torch.equal, ours, full))
