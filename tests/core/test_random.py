"""The door for randomness: uniform, independent by key, the same every time; and the enumerator's
weights.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.random import PURPOSES, Rng
from foretell.testing.outcomes import Enumerator


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean; below 4.5 for honest
    counts.
    """
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_uniform_over_positions_indices_and_seeds(purpose: str) -> None:
    draws = [
        [Rng(7).uniform(purpose, i) for i in range(20000)],
        [Rng(7).uniform(purpose, 3, i) for i in range(20000)],
        [Rng(i).uniform(purpose, 3) for i in range(20000)],
    ]
    for line in draws:
        counts, _ = np.histogram(line, bins=50, range=(0, 1))
        assert chi_square(counts, np.full(50, 400.0)) < 4.5
        assert min(line) >= 0 and max(line) < 1


def test_neighbouring_keys_are_independent() -> None:
    """Pairs that differ in one part of the key fill the square evenly."""
    rng = Rng(11)
    pairs = {
        "position": [
            (rng.uniform("target", i), rng.uniform("target", i + 1)) for i in range(0, 40000, 2)
        ],
        "index": [(rng.uniform("draft", i, 0), rng.uniform("draft", i, 1)) for i in range(20000)],
        "purpose": [(rng.uniform("target", i), rng.uniform("accept", i)) for i in range(20000)],
        "swapped": [
            (rng.uniform("draft", i, i + 1), rng.uniform("draft", i + 1, i))
            for i in range(0, 40000, 2)
        ],
        "seed": [
            (Rng(i).uniform("target", 5), Rng(i + 1).uniform("target", 5))
            for i in range(0, 40000, 2)
        ],
    }
    for name, points in pairs.items():
        x, y = np.array(points).T
        counts, *_ = np.histogram2d(x, y, bins=8, range=((0, 1), (0, 1)))
        assert chi_square(counts, np.full((8, 8), len(points) / 64)) < 4.5, name


@given(
    st.integers(-(2**63), 2**63),
    st.sampled_from(sorted(PURPOSES)),
    st.integers(0, 2**40),
    st.integers(0, 2**20),
)
def test_a_draw_depends_on_its_key_alone(
    seed: int, purpose: str, position: int, index: int
) -> None:
    a, b = Rng(seed), Rng(seed)
    a.uniform("target", 1)
    a.gumbel(3, 2)
    assert a.uniform(purpose, position, index) == b.uniform(purpose, position, index)


def test_sample_has_the_law() -> None:
    p = torch.tensor([0.1, 0.0, 0.55, 0.3, 0.05], dtype=torch.float64)
    counts = np.bincount([Rng(3).sample(p, "target", i) for i in range(20000)], minlength=5)
    assert counts[1] == 0
    seen = [0, 2, 3, 4]
    assert chi_square(counts[seen], 20000 * p.numpy()[seen]) < 4.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sample_never_gives_an_impossible_token(dtype: torch.dtype) -> None:
    for seed in range(300):
        p = torch.zeros(1000, dtype=dtype)
        p[[5, 900]] = torch.tensor([0.3, 0.7], dtype=dtype)
        assert Rng(seed).sample(p, "target", seed) in (5, 900)

    class Edge(Rng):
        def uniform(self, purpose: str, position: int, index: int = 0) -> float:
            return self.value

    edge = Edge(0)
    for edge.value in (0.0, 1 - 2.0**-53, 0.3):
        assert edge.sample(p, "target", 0) in (5, 900), "the ends of the unit interval as well"


def test_accept_is_strict_so_an_impossible_token_is_never_taken() -> None:
    class Zero(Rng):
        def uniform(self, purpose: str, position: int, index: int = 0) -> float:
            return 0.0

    assert not Zero(0).accept(0.0, "accept", 0) and Zero(0).accept(1e-9, "accept", 0)
    assert all(Rng(s).accept(1.0, "accept", s) for s in range(200))
    taken = sum(Rng(4).accept(0.3, "accept", i) for i in range(20000))
    assert abs(taken - 6000) < 4.5 * math.sqrt(20000 * 0.21)


def test_gumbel_noise_picks_by_the_law() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    noise = np.stack([Rng(9).gumbel(4, i).numpy() for i in range(10000)])
    counts = np.bincount((np.log(p) + noise).argmax(1), minlength=4)
    assert chi_square(counts, 10000 * p) < 4.5
    assert np.isfinite(noise).all() and torch.equal(Rng(9).gumbel(4, 2), Rng(9).gumbel(4, 2))


@given(
    st.lists(
        st.lists(st.floats(0, 1), min_size=1, max_size=4).filter(lambda w: sum(w) > 0.01),
        max_size=4,
    )
)
def test_enumerated_weights_are_the_product_law_and_sum_to_one(laws: list[list[float]]) -> None:
    tables = [[w / sum(law) for w in law] for law in laws]

    def function(door: Enumerator) -> tuple[int, ...]:
        return tuple(
            door.sample(torch.tensor(t, dtype=torch.float64), "target", i)
            for i, t in enumerate(tables)
        )

    found = [(value, weight) for weight, value in Enumerator.walk_outcomes(function)]
    want = {
        key: math.prod(t[k] for t, k in zip(tables, key, strict=True))
        for key in itertools.product(*(range(len(t)) for t in tables))
    }
    assert len({value for value, _ in found}) == len(found), "an outcome came twice"
    assert sum(weight for _, weight in found) == pytest.approx(1)
    assert dict(found) == pytest.approx(
        {k: w for k, w in want.items() if w > 0 or k in dict(found)}
    )


def test_enumeration_follows_what_earlier_draws_decide() -> None:
    def function(door: Enumerator) -> int:
        if door.accept(0.25, "accept", 0):
            return 10 + door.sample(torch.tensor([0.5, 0.5]), "target", 1)
        return sum(door.accept(0.5, "accept", 1, i) for i in range(3))

    law: dict[int, float] = {}
    for weight, value in Enumerator.walk_outcomes(function):
        law[value] = law.get(value, 0) + weight
    assert law == pytest.approx(
        {10: 0.125, 11: 0.125, 0: 0.75 / 8, 1: 2.25 / 8, 2: 2.25 / 8, 3: 0.75 / 8}
    )


def test_the_enumerator_refuses_a_key_used_twice_and_gumbel_noise() -> None:
    def twice(door: Enumerator) -> int:
        p = torch.tensor([0.5, 0.5])
        return door.sample(p, "draft", 0) + door.sample(p, "draft", 0)

    with pytest.raises(AssertionError, match="used twice"):
        list(Enumerator.walk_outcomes(twice))
    with pytest.raises(AssertionError, match="Gumbel"):
        list(Enumerator.walk_outcomes(lambda door: door.gumbel(2, 0)))
    assert list(
        Enumerator.walk_outcomes(
            lambda door: door.accept(1.0, "accept", 0) and not door.accept(0.0, "accept", 0)
        )
    ) == [(1.0, True)]
