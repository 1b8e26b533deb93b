"""What cache policies are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.kv.tova import Newest
from foretell.memory.policy import NEVER
from foretell.ops.keeping import Evicting, best


@pytest.mark.parametrize(("prompt", "first"), [(7, 13), (10, 13), (11, 11), (21, 21)])
def test_rows_are_given_up_at_due_lengths_alone(prompt: int, first: int) -> None:
    policy = Evicting(budget=10, every=3)
    policy.begin(prompt)
    assert [at for at in range(50) if policy.due(at)] == list(range(first, 50, 3))


@pytest.mark.parametrize(("prompt", "want"), [(10, []), (11, [11])])
def test_without_every_rows_are_given_up_behind_a_prompt_alone(
    prompt: int, want: list[int]
) -> None:
    policy = Evicting(budget=10, every=0)
    policy.begin(prompt)
    assert [at for at in range(50) if policy.due(at)] == want
    assert policy.room(30) > NEVER // 2


def test_a_piece_that_ends_early_evicts_nothing() -> None:
    """TOVA's pieces end before the newest token, which judges."""
    evicted: list[int] = []

    class Spied(Newest):
        def evict(self, cache: Any) -> None:
            evicted.append(cache.length)

    class Grown:
        length, base = 0, 99

    policy, cache = Spied(10, 3), Grown()
    policy.begin(21)
    while cache.length < 40:
        cache.length += policy.room(cache.length)
        policy.change(cache)
    assert evicted == list(range(21, 40, 3))


def test_of_equal_scores_the_later_rows_are_best() -> None:
    assert best(torch.tensor([3.0, 1.0, 3.0, 2.0, 1.0]), 4).tolist() == [2, 0, 3, 4]
