"""Recursive rejection on tables: chains, with and without replacement, mixtures; more in
test_laws.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.core.random import Door
from foretell.core.tree import Law, TokenTree
from foretell.verification.sequential import Sequential
from tests.verification.tables import (
    Table,
    chain,
    copies,
    enumerate_rule,
    expected_acceptance,
    joint,
    over_drafts,
    plain,
    table,
    without,
)


def without_replacement(
    draft: Table, count: int, fixed: tuple[int, ...] = ()
) -> Callable[[Door], TokenTree]:
    """Draws `count` different children, then adds fixed ones after them."""

    def draw(door: Door) -> TokenTree:
        tree, law = TokenTree(0), Law(draft(()))
        for k in range(count):
            token = door.sample(law.probs, "draft", 0, k)
            tree.add(0, token, law=law, value=0.5)
            if k + 1 < count:
                law = without(law, [token])
        for token in fixed:
            tree.add(0, token, value=0.5)
        return tree

    return draw


@pytest.mark.parametrize("seed", range(6))
def test_one_draft_is_accepted_as_often_as_the_laws_overlap(seed: int) -> None:
    p, q = table(seed, 4, zeros=True), table(seed + 100, 4, zeros=True)
    outputs, accepted = over_drafts(Sequential(), chain(q, 1), p, 1)
    assert outputs == pytest.approx(plain(p, 1), abs=1e-12)
    assert accepted == pytest.approx(float(torch.minimum(p(()), q(())).sum()), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_chains_and_trees_drawn_with_replacement(seed: int) -> None:
    p, q = table(seed, 3), table(seed + 50, 3)
    assert over_drafts(Sequential(), chain(q, 2), p, 3)[0] == pytest.approx(plain(p, 3), abs=1e-12)
    assert over_drafts(Sequential(), copies(q, 2, 2), p, 3)[0] == pytest.approx(
        plain(p, 3), abs=1e-12
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fixed", [(), (1,), (0, 2)])
def test_drawn_without_replacement_and_fixed_tokens_behind(
    seed: int, fixed: tuple[int, ...]
) -> None:
    p, q = table(seed, 4), table(seed + 50, 4)
    outputs, accepted = over_drafts(Sequential(), without_replacement(q, 2, fixed), p, 2)
    assert outputs == pytest.approx(plain(p, 2), abs=1e-12)
    assert accepted >= over_drafts(Sequential(), chain(q, 1), p, 2)[1], "a second try must not hurt"


@pytest.mark.parametrize("seed", range(6))
def test_fixed_tokens_are_accepted_with_their_mass(seed: int) -> None:
    tree = TokenTree(0).chain([1, 2]).chain([2, 0]).chain([0], at=1)
    rows = table(seed, 3)
    outputs, accepted = enumerate_rule(Sequential(), tree, rows)
    assert outputs == pytest.approx(joint(rows, tree), abs=1e-12)
    assert accepted == pytest.approx(expected_acceptance(tree, rows), abs=1e-12)


def test_equal_laws_are_always_accepted() -> None:
    """p = q: nothing is left after a refusal, and nothing may be divided by it."""
    p = table(9, 4)
    outputs, accepted = over_drafts(Sequential(), chain(p, 2), p, 2)
    assert accepted == pytest.approx(2, abs=1e-12) and outputs == pytest.approx(
        plain(p, 2), abs=1e-12
    )


def test_a_token_the_law_cannot_have_drawn_is_refused() -> None:
    tree = TokenTree(0)
    never = Law(torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    tree.add(0, 2, law=never, value=0.5)
    assert enumerate_rule(Sequential(), tree, table(1, 3))[1] == 0
    short = TokenTree(0)
    sparse = Law(torch.tensor([0.25, 0.75]), torch.tensor([0, 1]))
    short.add(0, 2, law=sparse, value=0.5)
    assert enumerate_rule(Sequential(), short, table(1, 3))[1] == 0
