"""Votes of tokens that are no part of a text: what they say, and that they leave no trace."""

from __future__ import annotations

import pytest
import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.kv.evict.dapq import Dapq
from foretell.kv.evict.snapkv import Snapkv
from foretell.kv.voting import Voted, poll_rows
from tests.kv.policies import PROMPT, taken_in, target
from tests.kv.twin import by_engine


@pytest.mark.parametrize(("window", "budget"), [(4, 10), (32, 40)])
def test_real_queries_at_their_own_positions_choose_as_snapkv(window: int, budget: int) -> None:
    prompt = [(11 * i + i * i) % 90 for i in range(window + 27)]
    model = target(dtype=torch.float64)
    cache = taken_in(model, prompt, len(prompt) - window)
    votes = poll_rows(model, cache, prompt[-window:], voted_rows=len(prompt))
    _, whole = by_engine(None, prompt, 2)
    _, held = by_engine(Snapkv(budget, window, 3), prompt, 2)
    choosing = Voted(budget, 0, window=window, kernel=3)
    for layer, parts in enumerate(held[len(prompt)]):
        rows = choosing.choose_rows(cache, layer, votes[layer]).sort(-1).values
        for ours, full in zip(parts, whole[len(prompt)][layer], strict=True):
            chosen = torch.stack([full[h, kept] for h, kept in enumerate(rows)])
            assert torch.allclose(ours, chosen, atol=1e-9)


def test_asking_leaves_a_cache_as_it_was() -> None:
    model = target(dtype=torch.float64)
    asked, other = (taken_in(model, PROMPT, len(PROMPT)) for _ in range(2))
    policy = Dapq(10).build_policy(model)
    asked.policy = policy
    before = asked.length, asked.base, asked.changes_at, asked.synced
    poll_rows(model, asked, [3, 1, 4])
    assert asked.policy is policy and not asked.tokens
    assert before == (asked.length, asked.base, asked.changes_at, asked.synced)
    asked.policy = None
    rows = []
    for cache in (asked, other):
        job, _ = cache.prepare(Ask(TokenTree(7).chain([5, 6])), [*PROMPT, 7], 1000)
        with torch.inference_mode():
            rows.append(model.forward([job])[0].logits)
    assert torch.equal(*rows)
    for one, two in zip((*asked.k, *asked.v), (*other.k, *other.v), strict=True):
        assert torch.equal(one[:, : asked.base], two[:, : other.base])


def test_a_forward_that_fails_leaves_a_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target(dtype=torch.float64)
    cache = taken_in(model, PROMPT, len(PROMPT))
    monkeypatch.setattr(model, "forward", lambda jobs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        poll_rows(model, cache, [3, 1, 4])
    assert cache.policy is None and not cache.tokens and cache.base == len(PROMPT)
