"""Weighted rejection against sums over all outcomes."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.strategies.samples.rejection import (
    Trial,
    draw_geometrically,
    draw_recursively,
    draw_weighted,
    mean_weight,
)
from foretell.testing.outcomes import Enumerator

P = [0.4, 0.3, 0.15, 0.1, 0.05]


def outcomes(
    p: list[float], allowed: set[int], estimator: str, accepts: int = 2, most: int = 0
) -> list[tuple[float, int, float, int]]:
    """(probability, token, weight, checks) of every outcome."""
    law = torch.tensor(p, dtype=torch.float64)
    found = []

    def once(door: Enumerator) -> tuple[int, float, int]:
        draws: list[int] = []
        checked: list[int] = []

        def draw(left: torch.Tensor) -> int:
            assert float(left.sum()) == pytest.approx(1, abs=1e-12)
            draws.append(0)
            return door.sample(left, "draft", 0, len(draws))

        def passes(token: int) -> bool:
            assert token not in checked, "the same token was checked twice"
            checked.append(token)
            return token in allowed

        mask = torch.tensor([token in allowed for token in range(len(p))])
        trial = Trial(law / law.sum(), draw, passes, lambda: mask, most)
        return *draw_weighted(trial, estimator, accepts), len(checked)

    for chance, (token, weight, checks) in Enumerator.walk_outcomes(once):
        found.append((chance, token, weight, checks))
    return found


def means(found: list[tuple[float, int, float, int]]) -> tuple[dict[int, float], dict[int, float]]:
    """Of each token its probability, and the mean of its weight."""
    chances: dict[int, float] = defaultdict(float)
    weights: dict[int, float] = defaultdict(float)
    for chance, token, weight, _ in found:
        chances[token] += chance
        weights[token] += chance * weight
    return chances, weights


def check(p: list[float], allowed: set[int], estimator: str, **more: Any) -> None:
    total = sum(p)
    z = sum(p[token] for token in allowed) / total
    chances, weights = means(outcomes(p, allowed, estimator, **more))
    if not allowed:
        assert chances == {-1: pytest.approx(1)} and weights[-1] == 0
        return
    for token in allowed:
        share = p[token] / total
        assert chances[token] == pytest.approx(share / z, abs=1e-9)
        assert weights[token] == pytest.approx(share, abs=1e-9)
    assert set(chances) == allowed


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize(
    ("estimator", "accepts"), [("recursive", 2), ("geometric", 2), ("geometric", 3)]
)
def test_the_law_and_the_mean_weight_of_a_token_are_exact(
    estimator: str, accepts: int, most: int
) -> None:
    for allowed in ({1, 3}, {4}, set()):
        check(P, allowed, estimator, accepts=accepts, most=most)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=4),
    st.integers(0, 15),
    st.sampled_from(["auto", "recursive", "geometric"]),
    st.sampled_from([0, 1]),
)
def test_any_law_and_any_form(shares: list[int], allowed: int, estimator: str, most: int) -> None:
    tokens = {token for token in range(len(shares)) if allowed >> token & 1}
    check([float(share) for share in shares], tokens, estimator, most=most)


def test_where_all_passes_the_weight_is_1_and_few_tokens_are_checked() -> None:
    for _, _, weight, checks in outcomes(P, set(range(5)), "recursive"):
        assert weight == pytest.approx(1, abs=1e-12) and checks == 2
    for _, _, weight, checks in outcomes(P, set(range(5)), "geometric"):
        assert weight == pytest.approx(1, abs=1e-12) and checks <= 2


def test_the_estimator_is_chosen_by_the_best_token_alone() -> None:
    spread, sharp = [0.5, 0.3, 0.2], [0.7, 0.2, 0.1]
    assert outcomes(spread, {0, 2}, "auto") == outcomes(spread, {0, 2}, "recursive")
    assert outcomes(sharp, {0, 2}, "auto") == outcomes(sharp, {0, 2}, "geometric")
    assert outcomes(spread, {0}, "auto", 3) == outcomes(spread, {0}, "geometric", 3)


def series(accepts: int, refused: int, lefts: list[float]) -> float:
    """The mean of the weight, summed over how often each refused token would have come again."""
    total = 0.0
    for counts in product(range(120), repeat=len(lefts)):
        chance = 1.0
        for left, count in zip(lefts, counts, strict=True):
            chance *= left * (1 - left) ** count
        total += chance * (accepts - 1) / (accepts - 1 + refused + sum(counts))
    return total


@pytest.mark.parametrize(
    ("accepts", "refused", "lefts"), [(2, 0, [0.3]), (2, 1, [0.9, 0.4]), (4, 2, [1.0, 0.6, 0.25])]
)
def test_the_mean_over_what_was_not_drawn_is_the_sum_over_all_of_it(
    accepts: int, refused: int, lefts: list[float]
) -> None:
    small = [left for left in lefts if left < 1]
    assert mean_weight(accepts, refused, lefts) == pytest.approx(
        series(accepts, refused, small), abs=1e-12
    )


def test_very_small_chances_keep_their_digits() -> None:
    """Of draws with replacement alone the mean is z, however small."""
    for z in (0.4, 1e-3, 1e-9, 1e-30):
        assert mean_weight(2, 0, [], 2, z) == pytest.approx(z, rel=1e-12)
        assert mean_weight(5, 0, [z, z], 3, z) == pytest.approx(z, rel=1e-12)


def test_a_slip_is_caught() -> None:
    """The refusals that were not drawn, left out."""
    found = outcomes(P, {1, 3}, "geometric")
    law = torch.tensor(P, dtype=torch.float64)

    def counted(door: Enumerator) -> tuple[int, float]:
        number = 0
        refused = 0

        def draw(left: torch.Tensor) -> int:
            nonlocal number
            number += 1
            return door.sample(left, "draft", 0, number)

        def passes(token: int) -> bool:
            nonlocal refused
            refused += token not in (1, 3)
            return token in (1, 3)

        token, _ = draw_geometrically(Trial(law, draw, passes, lambda: law > 0), 2)
        return token, 1 / (1 + refused)

    slipped = sum(chance * weight for chance, (_, weight) in Enumerator.walk_outcomes(counted))
    right = sum(chance * weight for chance, _, weight, _ in found)
    assert right == pytest.approx(0.4, abs=1e-9) and abs(slipped - 0.4) > 1e-2


def test_a_weight_of_one_token_is_its_chance() -> None:
    law = torch.tensor([0.75, 0.25], dtype=torch.float64)
    trial = Trial(law, lambda left: int(left.argmax()), lambda token: token == 1, lambda: law < 0.5)
    assert draw_recursively(trial) == (1, 0.25)
