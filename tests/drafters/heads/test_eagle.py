"""EAGLE-1: the tree of a fixed shape; its exactness is in test_laws.py.

Its network is tested in tests/heads.
"""

from __future__ import annotations

from foretell.drafters.heads.eagle import PLACES, Eagle
from foretell.testing.toy import Toy
from tests.drafters.heads.networks.driving import trees

TOY = Toy(9, seed=2, sharpness=6.0)


def test_the_tree_has_the_papers_shape() -> None:
    (tree, *_), calls = trees(Eagle(), TOY, tokens=9)
    assert len(PLACES) == 25 and calls["head"] >= 5
    widths = [tree.depths.count(depth) for depth in range(1, 6)]
    assert widths == [4, 8, 8, 3, 2]


def test_places_come_behind_what_they_stand_on() -> None:
    seen = {()}
    for place in PLACES:
        assert place[:-1] in seen
        seen.add(place)
