"""Streaming heads against plain loops, whatever leaves the cache and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.cache.buffers import roomy_length
from foretell.cache.cache import Cache
from foretell.cache.policy import NEVER
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.kv.select.ragged import Held, Ragged
from tests.kv import driving
from tests.kv.driving import GROUPS, LAYERS, TIMES, attended, drive, text_of

PROMPT = 17
WHOLE = text_of(33, seed=3)
HEADS = torch.tensor([[True, False], [False, False]])
SMALL = Ragged(3, 5, 4, whole=False, streaming=HEADS)


def loops(policy: Ragged) -> driving.Twin:
    def reads(text: tuple[int, ...], layer: int, head: int) -> Sequence[int]:
        places = range(len(text))
        if not policy.streaming[layer, head // TIMES]:
            return places
        return [p for p in places if p < policy.first_rows or len(text) - 1 - p < policy.recent]

    return reads


def differs(policy: Ragged, twin: driving.Twin, *how: Any) -> float:
    """How far what nodes get is from what the twin says, in the prompt too."""
    return max(
        float((got - attended(text, layer, twin)).abs().max())
        for text, layer, got in drive(policy, PROMPT, WHOLE, *how)
    )


@pytest.mark.parametrize(
    "heads", [HEADS, ~HEADS, torch.ones(2, 2, dtype=torch.bool), HEADS.flip(1)]
)
@pytest.mark.parametrize(
    ("block", "how"), [(4, (0, False, 99)), (4, (3, True, 1)), (1, (6, False, 5)), (9, (3, True))]
)
def test_every_node_sees_what_loops_say(heads: torch.Tensor, block: int, how: Any) -> None:
    policy = replace(SMALL, streaming=heads, block=block)
    assert differs(policy, loops(policy), *how) < 1e-9


@pytest.mark.parametrize(("first", "recent"), [(0, 1), (0, 6), (7, 1)])
def test_any_counts_of_rows(first: int, recent: int) -> None:
    policy = replace(SMALL, first_rows=first, recent=recent)
    assert differs(policy, loops(policy), 5, True) < 1e-9


@pytest.mark.parametrize("slip", ["lost block", "another head", "own rows", "late"])
def test_slips_are_seen(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SMALL
    if slip == "lost block":
        monkeypatch.setattr(Ragged, "join_rows", lambda self, held, k, v: held or Held(k, v))
    elif slip == "another head":
        made = replace(SMALL, streaming=HEADS.flip(1))
    elif slip == "own rows":  # those that still lie in the cache are seen by all
        monkeypatch.setattr(Ragged, "visible_rows", lambda self, job, asked: None)
    else:  # the first rows that streaming heads miss are seen
        monkeypatch.setattr(Ragged, "watches_job", lambda self, job: job.cache.length > 20)
    assert differs(made, loops(SMALL), 5, True) > 1e-3


def test_rows_in_the_middle_change_no_streaming_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that is neither a first one nor a last one of the last text."""
    real, end = driving.rows_of, len(WHOLE) - 2
    far = range(SMALL.first_rows, end - SMALL.recent + 1)

    def last_ones() -> dict[int, torch.Tensor]:
        found = {}
        for text, layer, got in drive(SMALL, PROMPT, WHOLE):
            if len(text) == end + 1:
                found[layer] = got
        return found

    def moved(text: tuple[int, ...], layer: int) -> driving.Rows:
        q, k, v = real(text, layer)
        return (q, k + 1, v + 7) if len(text) - 1 in far else (q, k, v)

    before = last_ones()
    monkeypatch.setattr(driving, "rows_of", moved)
    after = last_ones()
    for layer in range(LAYERS):
        for head in range(GROUPS * TIMES):
            changed = float((before[layer][head] - after[layer][head]).abs().max())
            if HEADS[layer, head // TIMES]:
                assert changed == 0
            else:
                assert changed > 0.1


def test_rows_leave_and_are_held_once_by_the_other_heads() -> None:
    told: list[Ragged] = []
    for _ in drive(SMALL, PROMPT, WHOLE, 5, True, told=told.append):
        pass
    (policy,) = told
    gone = (len(WHOLE) - 1 - 8) // 4 * 4
    assert {layer: held.keys.shape[:2] for layer, held in policy.held_rows.items()} == {
        0: (1, gone),
        1: (2, gone),
    }
    assert policy.bytes == 3 * gone * 2 * driving.WIDTH * 8


def test_buffers_of_a_long_prompt_become_short_when_its_rows_leave() -> None:
    cache = Cache(driving.LAYOUT, torch.float64, torch.device("cpu"))
    tokens = text_of(2000)
    job, _ = cache.prepare(Ask(TokenTree(tokens[-1])), tokens, 5000)
    for layer in range(LAYERS):
        rows = torch.arange(2000.0).double()[:, None].expand(GROUPS, -1, driving.WIDTH)
        job.write(layer, rows, -rows)
    cache.finish()
    cache.commit([*tokens, 0])
    twin = cache.fork()
    assert cache.capacity == roomy_length(2000)
    keys, _ = cache.give_rows(1900, 40)
    assert cache.capacity == 256 and keys[0].shape[1] == 1900
    kept = torch.cat([torch.arange(40), torch.arange(1940, 2000)]).double()
    for layer in range(LAYERS):
        assert cache.k[layer][1, :100, 3].equal(kept) and cache.v[layer][0, :100, 2].equal(-kept)
        assert twin.k[layer][1, :2000, 3].equal(torch.arange(2000.0).double())
    cache.prepare(Ask(TokenTree(0)), [*tokens, 0], 5000)
    assert cache.base == 100


def test_forks_go_their_own_ways() -> None:
    told: list[Ragged] = []
    for _ in drive(SMALL, PROMPT, WHOLE, told=told.append):
        pass
    (policy,) = told
    before = dict(policy.held_rows)
    twin = policy.fork()
    assert isinstance(twin, Ragged)
    twin.hold_rows([torch.ones(2, 4, 8).double()] * 2, [torch.ones(2, 4, 8).double()] * 2)
    assert all(policy.held_rows[layer] is before[layer] for layer in before)
    assert twin.held_rows[0].keys.shape[1] == policy.held_rows[0].keys.shape[1] + 4


def test_without_streaming_heads_it_does_nothing() -> None:
    none = replace(SMALL, streaming=torch.zeros(2, 2, dtype=torch.bool))
    assert none.room_left(3) == none.room_left(300) == NEVER
    ours, full = (drive(policy, PROMPT, WHOLE) for policy in (none, Quiet()))
    for (_, _, mine), (_, _, other) in zip(ours, full, strict=True):
        assert torch.equal(mine, other)


class Quiet(driving.Full):
    def room_left(self, length: int) -> int:
        return NEVER
