"""lserve: streaming heads, pages and reused choices, against plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from foretell.errors import BadConfig
from foretell.kv.select.coded import bounds_of
from foretell.kv.select.lserve import Lserve, Served
from foretell.kv.select.paging import page_extremes, upper_bounds
from tests.kv import driving
from tests.kv.driving import TIMES, WIDTH, attended, drive, rows_of, text_of
from tests.kv.policies import PROMPT as TEXT
from tests.kv.policies import run, target

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "lserve:budget=12,page=4,part=2,reuse=2,sinks=4,recent=4,prompt=8,gates={gates}"
LARGE_SPEC = "lserve:sparsity=0,bits=16"

PROMPT = 17
WHOLE = text_of(37, seed=7)
HEADS = torch.tensor([[True, False], [False, False]])
SMALL = Served(
    4, 8, 4, streaming=HEADS, count=3, part=2, reuse=2, in_prompt=12, bits=16, whole=False
)
HOWS = [(0, False, 99), (6, False, 5), (3, True, 1), (2, True, 99)]


def loops(policy: Served) -> driving.Twin:
    def reads(text: tuple[int, ...], layer: int, head: int) -> Sequence[int]:
        at, page = len(text) - 1, policy.block
        places = range(len(text))
        if policy.streaming[layer, head // TIMES]:
            last = policy.in_prompt if at < PROMPT else policy.recent
            return [p for p in places if p < policy.first_rows or at - p < last]
        newest = at // page
        if at < PROMPT or newest < policy.count:
            return places
        asking = max(PROMPT, at - at % policy.reuse)
        best = chosen(text[: asking + 1], layer, head)
        return [p for p in places if p // page in best or p // page == newest]

    @cache
    def chosen(text: tuple[int, ...], layer: int, head: int) -> set[int]:
        """By the query of this text's last token, the newest page aside."""
        q = rows_of(text, layer)[0][head]

        def bound(page: int) -> float:
            found = []
            for first in range(page * policy.block, (page + 1) * policy.block, policy.part):
                rows = range(first, first + policy.part)
                keys = [rows_of(text[: p + 1], layer)[1][head // TIMES] for p in rows]
                found.append(float((q * torch.stack(keys)).amax(0).sum()))
            return max(found)

        pages = range((len(text) - 1) // policy.block)
        return {*sorted(pages, key=bound, reverse=True)[: policy.count - 1]}

    return reads


def differs(policy: Served, twin: driving.Twin, *how: Any) -> float:
    return max(
        float((got - attended(text, layer, twin)).abs().max())
        for text, layer, got in drive(policy, PROMPT, WHOLE, *how)
    )


@pytest.mark.parametrize("how", HOWS)
def test_every_node_reads_what_loops_say(how: Any) -> None:
    assert differs(SMALL, loops(SMALL), *how) < 1e-9


@pytest.mark.parametrize(
    "other",
    [
        {"streaming": ~HEADS, "reuse": 4, "part": 4},
        {"streaming": torch.zeros(2, 2, dtype=torch.bool), "part": 1},
        {"reuse": 1, "in_prompt": 100, "count": 4},
        {"first_rows": 0, "recent": 4},
    ],
)
def test_other_settings(other: dict[str, Any]) -> None:
    policy = replace(SMALL, **other)
    assert differs(policy, loops(policy), 2, True) < 1e-9


def test_rows_of_8_bits_differ_by_half_a_step() -> None:
    policy = replace(SMALL, bits=8, count=99)  # else others may be chosen
    assert 1e-6 < differs(policy, loops(policy), 4, True) < 0.1


@pytest.mark.parametrize("slip", ["stale", "own", "no newest", "coarse", "rejected", "prompt"])
def test_slips_are_seen(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SMALL
    if slip == "stale":  # a choice holds for too long
        made = replace(SMALL, reuse=4)
    elif slip == "own":  # every token chooses for itself
        made = replace(SMALL, reuse=1)
    elif slip == "no newest":
        best = Served.best_pages
        monkeypatch.setattr(
            Served, "best_pages", lambda self, q, bounds: best(self, q, bounds).roll(1, -1)
        )
    elif slip == "coarse":
        made = replace(SMALL, part=4)
    elif slip == "rejected":  # the choice of a rejected draft is kept
        keep = Served.keep_nodes

        def beside(self: Served, cache: Any, nodes: Sequence[int]) -> None:
            keep(self, cache, nodes and [min(1, len(cache.tokens) - 1)])

        monkeypatch.setattr(Served, "keep_nodes", beside)
    else:
        made = replace(SMALL, in_prompt=8)
    assert differs(made, loops(SMALL), 2, True) > 1e-3


def test_a_rejected_draft_leaves_the_state_as_it_was() -> None:
    """After every text the choices are those of plain decoding."""
    states = []
    for depth, wrong in ((0, False), (6, True), (3, True)):
        told: list[Served] = []
        for _ in drive(SMALL, PROMPT, WHOLE, depth, wrong, told=told.append):
            pass
        states.append(told[0])
    for other in states[1:]:
        for layer in (0, 1):
            assert other.committed_pages[layer].equal(states[0].committed_pages[layer])
            assert other.bounds[layer].equal(states[0].bounds[layer])
            assert other.held_rows[layer].keys.equal(states[0].held_rows[layer].keys)


def test_parts_as_large_as_pages_choose_what_quest_does() -> None:
    random = torch.Generator().manual_seed(1)
    keys, q = (
        torch.randn(2, 40, WIDTH, generator=random),
        torch.randn(4, 6, WIDTH, generator=random),
    )
    policy = replace(SMALL, part=4, count=5)
    ours = policy.best_pages(q, page_extremes(keys, 4))
    best = upper_bounds(q, page_extremes(keys, 4)).topk(4, -1).indices
    quest = torch.zeros(4, 6, 10, dtype=torch.bool).scatter_(-1, best, True)
    assert ours[..., :-1].equal(quest) and bool(ours[..., -1].all())


def test_bounds_hold_for_rounded_rows_too() -> None:
    random = torch.Generator().manual_seed(2)
    keys, q = (
        torch.randn(2, 64, WIDTH, generator=random),
        torch.randn(4, 9, WIDTH, generator=random),
    )
    policy = replace(SMALL, bits=8, part=4)
    above = upper_bounds(q, bounds_of(keys, 4))
    held = policy.join_rows(None, keys, keys)
    for rows in (keys, held.read_rows()[0]):
        products = q @ rows.repeat_interleave(2, 0).transpose(1, 2)
        assert (above >= products.unflatten(-1, (-1, 4)).amax(-1) - 1e-5).all()


def test_with_room_for_everything_it_is_the_full_cache_bit_by_bit() -> None:
    class Ends(driving.Full):
        """Whose forwards end as those of pages do."""

        def room_left(self, length: int) -> int:
            return self.prompt - length if length < self.prompt else 4 - length % 4

    dense = replace(SMALL, streaming=torch.zeros(2, 2, dtype=torch.bool), count=11)
    ours = drive(dense, PROMPT, WHOLE, 4, True)
    for (_, _, mine), (_, _, full) in zip(ours, drive(Ends(), PROMPT, WHOLE, 4, True), strict=True):
        assert torch.equal(mine, full)


def test_the_defaults_leave_short_texts_alone() -> None:
    (want,) = run(target(), [TEXT], None)
    (live,) = run(target(), [TEXT], Lserve(sparsity=0, bits=16))
    assert live.ctx.output == want.ctx.output


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"budget": 128}, "lserve:budget=128.*3 pages of 64"),
        ({"budget": 4000}, "lserve:budget=4000.*whole pages of 64"),
        ({"sinks": 100}, "lserve:sinks=100"),
        ({"recent": 0}, "lserve:recent=0"),
        ({"prompt": 128}, "lserve:prompt=128.*at least 256"),
        ({"part": 24}, "lserve:part=24.*divisor of 64"),
        ({"reuse": 3}, "lserve:reuse=3.*divisor of 64"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        Lserve(**fields)
