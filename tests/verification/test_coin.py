"""One draw a node; its law is in test_laws.py."""

from __future__ import annotations

import pytest
import torch

from foretell.core.tree import Law, TokenTree
from foretell.verification.coin import Coin
from tests.verification.tables import enumerate_rule, expected_acceptance, joint, table


@pytest.mark.parametrize("seed", range(10))
def test_the_law_and_the_best_acceptance_of_fixed_tokens(seed: int) -> None:
    tree = TokenTree(0).chain([1, 2]).chain([2, 0]).chain([0], at=1)
    rows = table(seed, 3)
    outputs, accepted = enumerate_rule(Coin(), tree, rows)
    assert outputs == pytest.approx(joint(rows, tree), abs=1e-12)
    assert accepted == pytest.approx(expected_acceptance(tree, rows), abs=1e-12)


def test_children_that_cover_all_that_is_possible() -> None:
    """Rounding must not leave a chance for a token outside, whose law would be 0 / 0."""
    tree = TokenTree(0).chain([0]).chain([1]).chain([2])
    for seed in range(40):
        rows = table(seed, 3)
        outputs, _ = enumerate_rule(Coin(), tree, rows)
        assert all(0 <= token < 3 for path in outputs for token in path) and outputs


def test_drawn_tokens_are_not_for_it() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, law=Law(torch.tensor([0.5, 0.5])), value=0.5)
    assert not Coin().can_verify(tree) and Coin().can_verify(TokenTree(0).chain([1]))
