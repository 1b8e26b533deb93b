"""Clover: a tree without unlikely siblings; its exactness is in test_laws.py, its network in
tests/heads.
"""

from __future__ import annotations

import pytest

from foretell.drafters.heads.clover import Clover
from foretell.errors import Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees

SPECS = ["clover:depth=2,breadth=2,total=4", "clover:breadth=3,total=9,share=0"]
TOY = Toy(5, seed=2, sharpness=6.0)


def best_and_worst(drafter: Clover) -> list[tuple[float, float]]:
    """Of the children of each node of the first tree."""
    (tree, *_), _ = trees(drafter, TOY, tokens=8)
    values = [1.0 if value is None else value for value in tree.values]
    below = [
        [values[node] for node in range(1, len(tree)) if tree.parents[node] == parent]
        for parent in range(len(tree))
    ]
    return [(max(siblings), min(siblings)) for siblings in below if siblings]


def test_siblings_have_a_quarter_of_the_best_ones_chance() -> None:
    pairs = best_and_worst(Clover(depth=3, breadth=5, total=200))
    assert all(worst >= 0.25 * best for best, worst in pairs)
    assert any(worst < best for best, worst in pairs)
    every = best_and_worst(Clover(depth=3, breadth=5, total=200, share=0))
    assert any(worst < 0.25 * best for best, worst in every)


def test_the_likeliest_paths_of_all_levels_are_kept() -> None:
    (large, *_), _ = trees(Clover(depth=3, breadth=5, total=200, share=0.01), TOY)
    (small, *_), _ = trees(Clover(depth=3, breadth=5, total=5, share=0.01), TOY)
    best = sorted((value for value in large.values[1:]), reverse=True)[:5]
    assert sorted(small.values[1:], reverse=True) == pytest.approx(best)


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="clover cannot run on recurrent"):
        Clover().bring({"target": ToyRecurrent()})
