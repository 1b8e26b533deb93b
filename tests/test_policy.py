"""How many nodes are worth their cost, with costs set by hand: nothing here is timed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.engine import Context, Engine, Request
from foretell.models.toy import Toy
from foretell.policy import MARGIN, PROBE, Costs, Policy
from foretell.tree import Law, TokenTree
from foretell.types import Sampling
from tests import laws


def make(seconds: dict[int, float], nodes: int = 0, fixed: bool = False) -> Policy:
    engine = Engine({"target": Toy(4)})
    engine.costs["target"].seconds = dict(seconds)
    return Policy(Context(engine, Request([1], laws.build("ngram"), Sampling())), nodes, fixed)


def settle(policy: Policy, chances: list[float]) -> None:
    policy.accepted[:] = [1.0, *chances]


FLAT, STEEP = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}


def test_free_nodes_are_all_drafted_and_dear_ones_none() -> None:
    tree = TokenTree(0).chain(range(1, 4)).chain([2, 3])
    for costs, size in ((FLAT, len(tree)), (STEEP, 1)):
        policy = make(costs)
        settle(policy, [0.5, 0.4, 0.3, 0.2, 0.1])
        assert len(policy.fit(tree)) == size


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 0.5), st.floats(1, 3))
def test_the_size_is_the_best_of_all_sizes(chances: list[float], slope: float, power: float) -> None:
    policy = make({n: 1 + slope * (n - 1) ** power for n in (1, 2, 4, 8, 16)})
    settle(policy, chances)
    tree = TokenTree(0).chain([1] * len(chances))
    size = len(policy.fit(tree))
    costs = policy.ctx.costs
    speed = [(1 + sum(chances[: n - 1])) / costs(n) for n in range(1, len(tree) + 1)]
    if size == 1:
        assert max(speed) <= MARGIN * speed[0] + 1e-9
    else:
        assert speed[size - 1] == pytest.approx(max(speed)) and speed[size - 1] > MARGIN * speed[0] - 1e-9


def test_what_is_left_out_is_tried_now_and_then() -> None:
    policy = make(STEEP)
    policy.accepted[:] = [1.0, *[0.1] * 12]
    tree = TokenTree(0).chain([1, 2, 3] * 4)
    sizes = [len(policy.fit(tree)) for _ in range(2 * PROBE + 3)]
    assert [i for i, size in enumerate(sizes, 1) if size == 8] == [PROBE, 2 * PROBE] and set(sizes) == {1, 8}
    assert len(policy.fit(TokenTree(0))) == 1 and policy.step == 2 * PROBE + 3, "nothing proposed does not count"


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    policy, tree = make({n: 1 + 0.03 * n for n in (1, 2, 4, 8, 16)}), TokenTree(0).chain([1] * 10)
    for accepts in (False, True):
        sizes = []
        for _ in range(120):
            cut = policy.fit(tree)
            sizes.append(len(cut))
            policy.observe(cut, set(range(1, len(cut))) if accepts else set())
        assert (sizes[-1] > 8) == accepts and (sizes.count(1) > 60) != accepts


def test_the_budget_grows_with_what_is_best() -> None:
    policy, sizes = make(FLAT), []
    settle(policy, [1.0] * 80)
    for _ in range(5):
        sizes.append(policy.budget())
        policy.fit(TokenTree(0).chain([1] * (policy.budget() - 1)))
    assert sizes == sorted(sizes) and sizes[0] == 17 and sizes[-1] == 81


def test_drawn_trees_and_given_sizes_are_left_alone() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, Law(laws.torch.tensor([0.0, 1.0])))
    policy = make(STEEP)
    settle(policy, [0.0])
    assert policy.fit(tree) is tree, "cutting drawn nodes would bias them"
    long = TokenTree(0).chain([1] * 9)
    assert make(STEEP, nodes=5).fit(long) is long and make(STEEP, fixed=True).fit(long) is long
    assert make(FLAT, nodes=5).budget() == 6 and make(FLAT).budget() == 17


def test_acceptance_is_learnt_by_rank_and_shared_by_requests_of_a_method() -> None:
    policy = make(FLAT)
    tree = TokenTree(0).chain([1, 2]).chain([3])
    for _ in range(200):
        policy.fit(tree)
        policy.observe(tree, {1, 2})
    assert policy.accepted[1:] == pytest.approx([1, 1, 0], abs=1e-3)
    again = Policy(policy.ctx, 0)
    assert again.accepted is policy.accepted


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.floats(1e-4, 1), max_size=7))
def test_costs_never_fall_with_size(seconds: dict[int, float]) -> None:
    costs = Costs()
    costs.seconds = seconds
    line = [costs(n) for n in range(1, 130)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(line)) and line[0] > 0


def test_costs_follow_what_is_noted_and_forgive_a_hiccup() -> None:
    costs = Costs()
    for _ in range(100):
        costs.note(1, 0.010)
        costs.note(7, 0.014)
    assert costs(1) == pytest.approx(0.010) and costs(8) == pytest.approx(0.014)
    assert 0.010 < costs(4) < 0.014
    costs.note(1, 5.0)
    assert costs(1) < 0.0125
    for _ in range(100):
        costs.note(1, 0.020)
    assert costs(1) == pytest.approx(0.020, rel=0.01)
