"""Chimera: a tree of the likeliest paths, level by level; its exactness is in test_laws.py, its
network in tests/heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.drafters.heads.chimera import Chimera
from foretell.errors import Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees
from tests.drafters.heads.networks.serving import drafted

SPECS = ["chimera:depth=2,breadth=2,total=4", "chimera:breadth=3,total=9,least=0.2"]
TOY = Toy(5, seed=2, sharpness=6.0)


def test_the_tree_has_the_likeliest_paths() -> None:
    (tree, *_), calls = trees(Chimera(depth=3, breadth=5, total=9), TOY, tokens=8)
    assert len(tree) == 10 and max(tree.depths) <= 3 and calls["head"] >= 3
    for node in range(1, len(tree)):
        assert tree.values[node] <= tree.values[tree.parents[node]] + 1e-12
        assert tree.sources[node] == "chimera"


def test_other_parents_have_other_children(tmp_path: Path) -> None:
    """What a head of random weights on a decoder says after siblings."""
    tree = drafted("chimera", Chimera(depth=2, breadth=4, total=20), tmp_path)
    below = [
        tuple(tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == parent)
        for parent in range(1, 5)
    ]
    assert all(below) and len(set(below)) > 1


def test_no_level_is_deeper_than_there_are_matrices(tmp_path: Path) -> None:
    tree = drafted("chimera", Chimera(depth=6, breadth=2, total=40), tmp_path, heads=2)
    assert max(tree.depths) == 2


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="chimera cannot run on recurrent"):
        Chimera().bring({"target": ToyRecurrent()})
