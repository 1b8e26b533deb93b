"""drafters/heads/ranks.py: the best places of a tree, against all places there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foretell.drafters.heads.networks.ranks import (
    Path,
    best_paths,
    expected_tokens,
    path_probability,
    smooth_table,
)


def table(seed: int) -> list[list[float]]:
    draw = np.random.default_rng(seed)
    widths = draw.integers(1, 5, draw.integers(1, 5))
    return smooth_table([(draw.random(width) / width).tolist() for width in widths])


def all_paths(shares: list[list[float]]) -> list[Path]:
    by_depth = (itertools.product(*map(range, map(len, shares[:n]))) for n in range(1, 5))
    return list(dict.fromkeys(itertools.chain(*itertools.islice(by_depth, len(shares)))))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("count", [1, 4, 11, 1000])
def test_the_best_of_all_places_are_found(seed: int, count: int) -> None:
    shares = table(seed)
    everything = sorted(
        (path_probability(shares, path) for path in all_paths(shares)), reverse=True
    )
    found = best_paths(shares, count)
    assert len(set(found)) == len(found) == min(count, len(everything))
    assert [path_probability(shares, path) for path in found] == pytest.approx(everything[:count])
    assert expected_tokens(shares, found) == pytest.approx(1 + sum(everything[:count]))


@pytest.mark.parametrize("seed", range(30))
def test_a_place_comes_behind_its_parent_and_the_better_sibling(seed: int) -> None:
    seen: set[Path] = {()}
    for path in best_paths(table(seed), 20):
        assert path[:-1] in seen
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in seen
        seen.add(path)


def test_the_forecast_is_what_independent_depths_give() -> None:
    """Against draws of one rank a depth: the path that is right goes on while it is in the tree."""
    shares = [[0.5, 0.2, 0.1], [0.4, 0.3]]
    paths = best_paths(shares, 5)
    draw = np.random.default_rng(0)
    chances = [[*row, 1 - sum(row)] for row in shares]
    ranks = np.stack([draw.choice(len(row), 20_000, p=row) for row in chances], 1)
    tokens = 1 + sum((ranks[:, : len(path)] == path).all(1).mean() for path in paths)
    assert expected_tokens(shares, paths) == pytest.approx(tokens, abs=0.02)


def test_a_table_that_rises_by_chance_is_smoothed() -> None:
    assert smooth_table([[0.2, 0.3], [0.1]]) == [[0.3, 0.2], [0.1]]


def test_an_empty_table_has_no_places() -> None:
    assert best_paths([], 4) == [] and best_paths([[]], 4) == []
