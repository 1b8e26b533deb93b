"""EAGLE-3: the tree of the likeliest paths; its exactness is in test_laws.py, its network in
tests/heads.
"""

from __future__ import annotations

import pytest

from foretell.drafters.heads.eagle3 import Eagle3
from foretell.errors import Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees

SPECS = ["eagle3:depth=2,breadth=2,total=4", "eagle3:depth=3,breadth=2,total=3"]
TOY = Toy(5, seed=2, sharpness=6.0)


def test_the_tree_has_the_likeliest_paths_of_all() -> None:
    """Against all paths, sorted: with as many children as there are tokens nothing is missed."""
    (tree, *_), calls = trees(Eagle3(depth=3, breadth=5, total=9), TOY, tokens=8)
    assert len(tree) == 10 and max(tree.depths) <= 3 and calls["head"] >= 3
    for node in range(1, len(tree)):
        assert tree.values[node] <= tree.values[tree.parents[node]] + 1e-12
        assert tree.sources[node] == "eagle3"


def test_a_small_budget_keeps_the_best() -> None:
    drafter = Eagle3(depth=3, breadth=3, total=20)
    (large, *_), _ = trees(drafter, TOY)
    (small, *_), _ = trees(drafter, TOY, nodes=4)
    best = sorted(large.values[1:], reverse=True)[:4]
    assert sorted(small.values[1:], reverse=True) == pytest.approx(best)


def test_it_drafts_the_same_at_any_temperature() -> None:
    (cold, *_), _ = trees(Eagle3(depth=2, breadth=2, total=4), TOY)
    (warm, *_), _ = trees(Eagle3(depth=2, breadth=2, total=4), TOY, temperature=1.0, seed=3)
    assert repr(cold) == repr(warm) and not any(warm.laws)


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="eagle3 cannot run on recurrent"):
        Eagle3().bring({"target": ToyRecurrent()})
