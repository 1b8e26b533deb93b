"""Acceptance by a coin: the rates are those asked for, at temperature 0 too, and the law is another
one.
"""

from __future__ import annotations

import pytest

from foretell.core.random import Rng
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.spec import resolve_method
from foretell.verification.synthetic import Synthetic
from tests import laws
from tests.verification.tables import differs, enumerate_rule, joint, table, target


def test_a_chain_is_accepted_at_the_rate_that_was_asked_for() -> None:
    tree, rows = TokenTree(0).chain([1, 2, 1]), table(3, 3)
    law, _ = enumerate_rule(Synthetic(rate=0.7), tree, rows)
    begins = sum(p for words, p in law.items() if words[:3] == (1, 2, 1))
    assert begins >= 0.7**3 - 1e-9, (
        "a chain of three is taken with chance 0.343, and the target may say the same"
    )
    assert differs(law, joint(rows, tree)) > 0.05


@pytest.mark.parametrize(("rate", "path"), [(1.0, [1, 2]), (0.0, [])])
def test_certain_coins(rate: float, path: list[int]) -> None:
    tree, rows = TokenTree(0).chain([1, 2]).chain([2]), table(3, 3)
    outcome = Synthetic(rate)(tree, target(rows, tree), Rng(0), 0)
    assert outcome.path == path and [n for n, _ in outcome.tested] == ([1, 2] if path else [1, 3])


def test_siblings_are_tried_at_falling_rates() -> None:
    tree, rows, hits = TokenTree(0).chain([1]).chain([2]), table(3, 3), [0, 0]
    for seed in range(4000):
        outcome = Synthetic(0.6, 0.5)(tree, target(rows, tree), Rng(seed), 0)
        if outcome.path:
            hits[outcome.path[0] - 1] += 1
    assert hits[0] / 4000 == pytest.approx(0.6, abs=0.03) and hits[1] / 4000 == pytest.approx(
        0.4 * 0.3, abs=0.03
    )


def test_it_gives_the_tokens_a_step_of_its_rate_at_temperature_zero_too() -> None:
    setting = laws.Setting(Sampling(max_new_tokens=400))
    strategy = resolve_method("draft:length=4,rule=synthetic,rate=0.8,nodes=4")[1]
    live = laws.generate(strategy, [1, 2], setting, laws.world(strategy, 8))
    expected = sum(0.8**k for k in range(5))
    assert live.ctx.stats.mat == pytest.approx(expected, rel=0.15)
