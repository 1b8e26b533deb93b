"""Multi-token prediction as a drafter; its exactness is in test_laws.py, its network in
tests/heads.
"""

from __future__ import annotations

import pytest

from foretell.drafters.heads.mtp import Mtp
from foretell.errors import Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees

SPECS = ["mtp:depth=2,breadth=2,total=4"]
TOY = Toy(5, seed=2, sharpness=6.0)


def test_the_papers_chain_has_the_best_tokens() -> None:
    (tree, *_), calls = trees(Mtp(breadth=1, total=3), TOY, tokens=9)
    assert tree.parents == [-1, 0, 1, 2] and calls["head"] >= 3
    assert tree.sources[1:] == ["mtp"] * 3 and not any(tree.laws)
    (wide, *_), _ = trees(Mtp(breadth=5, total=60), TOY, tokens=9)
    best = max((n for n in range(len(wide)) if wide.depths[n] == 1), key=wide.values.__getitem__)
    assert tree.tokens[1] == wide.tokens[best] and tree.values[1] == wide.values[best]


def test_a_tree_has_the_likeliest_paths() -> None:
    (tree, *_), _ = trees(Mtp(depth=3, breadth=3, total=7), TOY, tokens=9)
    assert len(tree) == 8
    for node in range(1, len(tree)):
        assert tree.values[node] <= tree.values[tree.parents[node]] + 1e-12


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="mtp cannot run on recurrent"):
        Mtp().bring({"target": ToyRecurrent()})
