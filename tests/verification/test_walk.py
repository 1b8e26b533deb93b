"""The walk on tables; more in test_laws.py."""

from __future__ import annotations

import pytest

from foretell.core.random import Rng
from foretell.core.tree import TokenTree
from foretell.verification.walk import Walk
from tests.verification.tables import (
    copies,
    enumerate_rule,
    expected_acceptance,
    joint,
    over_drafts,
    plain,
    table,
    target,
)


@pytest.mark.parametrize("seed", range(5))
def test_the_law_and_the_best_acceptance_of_fixed_tokens(seed: int) -> None:
    tree = TokenTree(0).chain([1, 2]).chain([2, 0]).chain([0], at=1)
    rows = table(seed, 3, zeros=True)
    outputs, accepted = enumerate_rule(Walk(), tree, rows)
    assert outputs == pytest.approx(joint(rows, tree), abs=1e-12)
    assert accepted == pytest.approx(expected_acceptance(tree, rows), abs=1e-12)


def test_drawn_trees_as_well() -> None:
    rows = table(1, 3)
    outputs, _ = over_drafts(Walk(), copies(table(2, 3), 1, 2), rows, 2)
    assert outputs == pytest.approx(plain(rows, 2), abs=1e-12)


def test_the_tokens_do_not_depend_on_the_tree() -> None:
    """Draws are keyed by position alone, so a longer tree extends what a shorter one gave."""
    rows = table(3, 4)
    full = TokenTree(0)
    for level in range(3):
        for node in [n for n in range(len(full)) if full.depths[n] == level]:
            for token in range(4):
                full.add(node, token, value=0.25**level)
    for seed in range(30):
        said = []
        for tree in (TokenTree(0), TokenTree(0).chain([1, 2, 3]), full):
            outcome = Walk()(tree, target(rows, tree), Rng(seed), 5)
            said.append([*(tree.tokens[n] for n in outcome.path), outcome.token])
        for tokens in said:
            assert tokens == said[-1][: len(tokens)]
        assert len(said[-1]) == 4


def test_tested_tells_every_child_it_looked_at() -> None:
    tree = TokenTree(0).chain([0, 1]).chain([2])
    for seed in range(10):
        outcome = Walk()(tree, target(table(4, 3), tree), Rng(seed), 0)
        seen = dict(outcome.tested)
        assert set(seen) == ({1, 3} | ({2} if 1 in outcome.path else set()))
        assert [n for n, good in outcome.tested if good] == outcome.path
