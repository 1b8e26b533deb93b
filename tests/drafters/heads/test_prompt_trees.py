"""drafters/heads/prompt_trees.py against brute force and simulated steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foretell.drafters.heads.networks.ranks import best_paths, expected_tokens, typical_table
from foretell.drafters.heads.prompt_trees import (
    LIMITS,
    Shapes,
    best_limit,
    best_trees,
    full_trees,
    steady_shares,
    trim_rows,
)

Shares = tuple[tuple[float, ...], ...]
TABLE: Shares = ((0.5, 0.2, 0.1), (0.35, 0.15, 0.05), (0.2, 0.1, 0.05))


def random_table(seed: int, depths: int = 3, ranks: int = 4) -> Shares:
    """Of shares that do not rise, and sum to less than 1 at each depth."""
    draw = np.random.default_rng(seed)
    rows = draw.dirichlet(np.ones(ranks + 1), depths)[:, :ranks]
    return tuple(tuple(sorted(row.tolist(), reverse=True)) for row in rows)


@pytest.mark.parametrize("seed", range(5))
def test_a_step_ends_somewhere(seed: int) -> None:
    table = random_table(seed)
    shapes = Shapes(table, 9)
    paths = best_paths(table, 9)
    ending = shapes.end_chances(2, 9)
    assert sum(ending) == pytest.approx(1) and min(ending) >= 0
    deep = [0, *map(len, paths)]
    mean = 1 + sum(mass * depth for mass, depth in zip(ending, deep, strict=True))
    assert mean == pytest.approx(expected_tokens(table, paths))
    assert mean == pytest.approx(shapes.step_tokens(2, 9))


@pytest.mark.parametrize("seed", range(8))
def test_trimming_loses_least(seed: int) -> None:
    """Against all ways to give rows, where another row never promises more than the one before."""
    draw = np.random.default_rng(seed)
    ending = draw.dirichlet(np.ones(4)).tolist()
    gains = sorted(draw.random(2), reverse=True)
    promises = [1.0, 1.0 + gains[0], 1.0 + sum(gains)]

    def worth(counts: tuple[int, ...]) -> float:
        return sum(mass * promises[n - 1] for mass, n in zip(ending, counts, strict=True))

    for total in range(4, 13):
        counts = trim_rows(ending, promises, total)
        fitting = [c for c in itertools.product((1, 2, 3), repeat=4) if sum(c) <= total]
        assert sum(counts) == total and min(counts) >= 1
        assert worth(counts) == pytest.approx(max(map(worth, fitting)))
    assert trim_rows(ending, promises, 2) == (1, 1, 1, 1)  # a node never loses its last row
    assert trim_rows(ending, promises, 99) == (3, 3, 3, 3)
    assert trim_rows(ending, [1.2], 2) == (1, 1, 1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_steady_state_is_where_steps_leave_it(seed: int) -> None:
    moves = np.random.default_rng(seed).dirichlet(np.ones(3), 3)
    shares = steady_shares(moves)
    assert shares.sum() == pytest.approx(1)
    assert shares @ moves == pytest.approx(shares, abs=1e-5)
    walked = np.linalg.matrix_power(moves, 200)[2]
    assert shares == pytest.approx(walked, abs=1e-5)


def test_states_that_are_never_left_are_those_that_a_text_comes_to() -> None:
    assert steady_shares(np.eye(3)) == pytest.approx([0, 0, 1])
    moves = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    assert steady_shares(moves) == pytest.approx([1, 0, 0], abs=1e-5)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("most", [2, 40])
def test_every_tree_fits_and_every_node_has_a_row(limit: int, most: int) -> None:
    for state, tree in enumerate(best_trees(TABLE, limit, most).trees, 1):
        assert tree.size <= limit and min(tree.counts) >= 1 and max(tree.counts) <= 3
        assert len(tree.counts) == 1 + len(tree.paths) <= 1 + most
        assert max(map(len, tree.paths), default=0) <= state
        assert all(path[:-1] in ((), *tree.paths[:i]) for i, path in enumerate(tree.paths))
    full = full_trees(TABLE, limit, most)
    assert all(tree.size <= max(limit, 4) for tree in full.trees)
    assert all(set(tree.counts) == {3} for tree in full.trees)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_sizes(seed: int) -> None:
    """Against all sizes: it is theirs, or short of it by a hundredth of what drafting brings."""
    table = random_table(seed)
    shapes = Shapes(table, 8)
    for limit in (8, 13, 18):
        sizes = itertools.product(range(1, limit // 2), repeat=3)
        best = max(shapes.mean_tokens(limit, size) for size in sizes)
        found = best_trees(table, limit, 99).tokens
        assert best >= found - 1e-9 and found - 1 >= 0.99 * (best - 1)


@pytest.mark.parametrize("limit", LIMITS[1:])
def test_rows_where_they_promise_most_beat_as_many_everywhere(limit: int) -> None:
    dynamic = best_trees(TABLE, limit, 99).tokens
    assert dynamic > full_trees(TABLE, limit, 99).tokens
    assert dynamic >= best_trees(TABLE, LIMITS[0], 99).tokens


@pytest.mark.parametrize(("limit", "sparse"), [(10, True), (24, True), (24, False)])
def test_the_forecast_is_what_steps_bring(limit: int, sparse: bool) -> None:
    """Steps whose ranks are drawn from the table, walked down the trees from state to state."""
    trees = (best_trees if sparse else full_trees)(TABLE, limit, 99)
    draw = np.random.default_rng(0)
    steps = 20_000
    ranks = np.stack(
        [draw.choice(4, steps, p=[*row, 1 - sum(row)]) for row in TABLE], 1
    )  # 3: none of them
    state, tokens = 3, np.zeros(steps)
    counts = [dict(zip(((), *tree.paths), tree.counts, strict=True)) for tree in trees.trees]
    for step, drawn in enumerate(ranks.tolist()):
        rows = counts[state - 1]
        deep = 0
        while deep < 3 and tuple(drawn[: deep + 1]) in rows:
            deep += 1
        tokens[step] = 1 + deep
        state = rows[tuple(drawn[:deep])]
    noise = tokens.std() / np.sqrt(steps)
    assert abs(tokens.mean() - trees.tokens) < 4 * noise


def test_the_limit_is_that_of_most_tokens_a_second() -> None:
    found = [best_trees(TABLE, limit, 99).tokens for limit in LIMITS]
    assert best_limit(found, [1.0] * len(LIMITS)) == len(LIMITS) - 1
    assert best_limit(found, [float(limit) for limit in LIMITS]) == 0
    kept = best_limit(found, [1.0 if limit <= 16 else 3.0 for limit in LIMITS])
    assert LIMITS[kept] == 16


def test_the_usual_shares_fall_with_the_square_of_the_rank() -> None:
    assert typical_table((0.4, 0.1), 2) == ((0.4, 0.1), (0.1, 0.025))
