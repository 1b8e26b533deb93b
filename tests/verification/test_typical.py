"""Typical acceptance on tables: which tokens pass, and that the law is another one."""

from __future__ import annotations

import math

import pytest

from foretell.core.random import Rng
from foretell.core.tree import TokenTree
from foretell.verification.typical import Typical
from tests.verification.tables import differs, enumerate_rule, joint, table, target


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_path_of_passing_tokens_wins_the_likelier_of_equals(seed: int) -> None:
    tree = TokenTree(0).chain([1, 2]).chain([2, 0, 1]).chain([0], at=1)
    rows, rule = table(seed, 3), Typical(epsilon=0.3, delta=0.6)

    def passes(words: list[int]) -> float:
        """The path's probability, 0 if one of its tokens does not pass."""
        chance = 1.0
        for i, token in enumerate(words):
            p = rows(tuple(words[:i])).tolist()
            entropy = -sum(x * math.log(x + 1e-5) for x in p)
            chance *= p[token] if p[token] > min(0.3, 0.6 * math.exp(-entropy)) else 0
        return chance

    words = [tree.tokens_to(n) for n in range(len(tree))]
    best = max((w for w in words if passes(w)), key=lambda w: (len(w), passes(w)))
    outcome = rule(tree, target(rows, tree), Rng(seed), 0)
    assert [tree.tokens[n] for n in outcome.path] == best


def test_the_law_is_not_the_targets() -> None:
    tree, rows = TokenTree(0).chain([1, 2]), table(3, 3)
    assert differs(enumerate_rule(Typical(), tree, rows)[0], joint(rows, tree)) > 0.05
    assert not Typical().exact
