"""`treekv` is Algorithm 1 of the paper, written as loops over lists."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from foretell.errors import BadConfig, Unsupported
from foretell.kv.evict import treekv
from foretell.kv.evict.treekv import Tree, Treekv, block_survivors, find_survivors
from foretell.spec import build_cache_policy
from tests.kv.loops import LoopLlama, Row, check
from tests.kv.policies import PROMPT, target

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "treekv:budget=10,sinks=1,every=3,block=2"


def mean(row: Row) -> float:
    return row.got / row.seen


class Algorithm1:
    """Of one head. `idx` counts from 1, as in the paper."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.idx = 1

    def shrink(self, region: list[Row]) -> None:
        come = region[self.c :]
        del region[self.c :]
        for row in come:
            region.append(row)
            left, right = region[self.idx - 1], region[self.idx]
            region.remove(left if mean(left) <= mean(right) else right)
            self.idx = self.idx % self.c + 1


def shrink_prompt(region: list[Row], c: int, b: int) -> None:
    """The same with blocks in place of rows."""
    blocks = []
    while len(region) >= b + c % b:
        rows = [region.pop(0) for _ in range(b)]
        score = sum(mean(row) for row in rows) / b
        blocks.append(Row(0, rows, None, got=score, seen=1))  # type: ignore[arg-type]
    Algorithm1(c // b).shrink(blocks)
    region[:0] = [row for block in blocks for row in block.key]  # type: ignore[misc]
    Algorithm1(c).shrink(region)


class Twin:
    """What `check` calls after every token."""

    def __init__(self, kv: Treekv, prompt: int) -> None:
        self.kv, self.prompt = kv, prompt
        self.recent = kv.recent or kv.budget // 2 - kv.sinks
        self.c = kv.budget - kv.sinks - self.recent
        self.pointers: dict[tuple[int, int], Algorithm1] = {}

    def __call__(self, loop: LoopLlama) -> None:
        many = self.kv.budget + self.kv.every
        for layer, heads in enumerate(loop.rows):
            for head, rows in enumerate(heads):
                pointer = self.pointers.setdefault((layer, head), Algorithm1(self.c))
                end = len(rows) - self.recent
                region = rows[self.kv.sinks : end]
                if loop.length == self.prompt and len(rows) > self.kv.budget:
                    shrink_prompt(region, self.c, self.kv.block)
                elif len(rows) >= many:
                    pointer.shrink(region)
                rows[self.kv.sinks : end] = region


@pytest.mark.parametrize(
    "spec",
    [
        "budget=9,sinks=1,recent=3,block=2",
        "budget=10,sinks=2,block=3,every=4",
        "budget=12,sinks=0,recent=3,block=4,every=3",
        "budget=8,sinks=1,recent=2,block=5,positions=text",
        "budget=30,sinks=2,recent=9,block=6",  # the prompt is whole
    ],
)
def test_it_is_algorithm_1(spec: str) -> None:
    kv = build_cache_policy(f"treekv:{spec}")
    assert isinstance(kv, Treekv)
    twin = Twin(kv, len(PROMPT))
    loop = check(kv, kv.positions == "slots", twin, PROMPT, 20, len(PROMPT) - kv.block)
    places = [[row.place for row in rows] for heads in loop.rows for rows in heads]
    assert len({tuple(rows) for rows in places}) > 1  # heads choose by themselves
    for rows in places:
        assert rows[: kv.sinks] == [*range(kv.sinks)]
        assert rows[-twin.recent :] == [*range(loop.length - twin.recent, loop.length)]
        assert all(one < two for one, two in pairwise(rows))


def by_sums(self: Tree, cache: Any, heads: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(heads, cache.base, dtype=torch.long)


def still(means: torch.Tensor, size: int, pointer: int) -> torch.Tensor:
    return find_survivors(means, size, 0)


def the_stronger(means: torch.Tensor, size: int, pointer: int) -> torch.Tensor:
    return find_survivors(-means, size, pointer)


def row_by_row(means: torch.Tensor, size: int, block: int) -> torch.Tensor:
    return find_survivors(means, size, 0)


SLIPS = {
    "sums in place of means": (Tree, "_token_positions", by_sums),
    "a pointer that stays": (treekv, "find_survivors", still),
    "the stronger goes": (treekv, "find_survivors", the_stronger),
    "a prompt row by row": (treekv, "block_survivors", row_by_row),
    "all of the prompt judges": (Tree, "first_watched", property(lambda self: 0)),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_the_loop_catches_slips(monkeypatch: pytest.MonkeyPatch, slip: str) -> None:
    kv = Treekv(10, sinks=2, block=3, every=4)
    monkeypatch.setattr(*SLIPS[slip])
    with pytest.raises(AssertionError):
        check(kv, True, Twin(kv, len(PROMPT)), PROMPT, 14, len(PROMPT) - kv.block)


def test_blocks_of_one_row_are_the_rule_of_decoding() -> None:
    for rows in (8, 9, 30, 71):
        means = torch.rand(5, rows)
        assert block_survivors(means, 7, 1).equal(find_survivors(means, 7, 0))


def test_a_sweep_takes_one_of_each_pair() -> None:
    left = find_survivors(torch.rand(20, 16), 8, 0)
    assert left.shape == (20, 8)
    for rows in left.tolist():
        assert all(sum(row in rows for row in (i, i + 1)) == 1 for i in range(0, 16, 2))


def test_of_equal_neighbours_the_earlier_goes() -> None:
    assert find_survivors(torch.zeros(1, 6), 4, 0).tolist() == [[1, 3, 4, 5]]
    assert find_survivors(torch.zeros(1, 5), 4, 3).tolist() == [[0, 1, 2, 4]]


@pytest.mark.parametrize("block", [2, 3, 8])
def test_a_prompt_loses_blocks_and_the_rest_of_the_oldest(block: int) -> None:
    rows = random.Random(block)
    for _ in range(20):
        size = rows.randint(2 * block, 5 * block)
        means = torch.rand(1, size + rows.randint(1, 60))
        (left,) = block_survivors(means, size, block).tolist()
        assert len(left) == size and left == sorted(set(left))
        blocks: dict[int, int] = {}
        whole = (means.shape[1] - size % block) // block * block
        for row in left:
            blocks[row // block] = blocks.get(row // block, 0) + 1
        broken = [i for i, count in blocks.items() if count < block and i * block < whole]
        assert len(broken) <= 2 and {*broken} <= {*sorted(blocks)[:2]}
        assert {*range(whole, means.shape[1])} <= {*left}


@pytest.mark.parametrize("size", [32, 128])
def test_scored_by_coin_the_tree_spans_a_harmonic_number(size: int) -> None:
    """So rows get ever sparser: a tree of c rows spans 1.35 to 1.55 c H_c tokens."""
    tosses = torch.Generator().manual_seed(size)
    heads, tokens = 16, 12 * size
    places = torch.arange(size).repeat(heads, 1)
    spans, pointer = [], 0
    for token in range(size, tokens):
        places = torch.cat([places, torch.full((heads, 1), token)], 1)
        scores = torch.rand(heads, size + 1, generator=tosses)
        places = places.gather(1, find_survivors(scores, size, pointer))
        pointer = (pointer + 1) % size
        if token > tokens // 2:
            spans.append((places[:, -1] - places[:, 0]).double().mean())
    harmonic = sum(1 / i for i in range(1, size + 1))
    ratio = float(torch.stack(spans).mean()) / (size * harmonic)
    assert 1.35 < ratio < 1.55


def test_what_a_model_without_rotations_can_do() -> None:
    model = target("gpt2")
    with pytest.raises(Unsupported, match="rotations"):
        build_cache_policy("treekv").build_policy(model)
    build_cache_policy("treekv:positions=text").build_policy(model)


@pytest.mark.parametrize(
    ("spec", "said"), [("budget=5", "budget"), ("budget=20,recent=16", "budget")]
)
def test_bad_settings_are_refused(spec: str, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        build_cache_policy(f"treekv:{spec}")
