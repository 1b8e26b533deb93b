"""Falcon: several levels a pass; its exactness is in test_laws.py, its network in tests/heads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretell.drafters.heads.falcon import Falcon
from foretell.drafters.heads.head_tree import Levels
from foretell.errors import Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees
from tests.drafters.heads.networks.serving import drafted

SPECS = ["falcon:passes=2,breadth=2,total=5", "falcon:passes=1,breadth=3,total=9,least=0.2"]
TOY = Toy(5, seed=2, sharpness=6.0)


def test_a_pass_gives_two_levels() -> None:
    for passes in (1, 2, 3):
        (tree, *_), calls = trees(Falcon(passes=passes, breadth=2, total=99), TOY, tokens=20)
        assert max(tree.depths) == 2 * passes
        assert calls["head"] % passes == 0 or calls["head"] > passes
    (tree, *_), _ = trees(Falcon(passes=4, breadth=2, total=165), TOY, tokens=20)
    assert max(tree.depths) == 8


def test_no_level_is_drafted_that_there_is_no_room_for() -> None:
    found, _ = trees(Falcon(passes=4, breadth=2, total=99), TOY, tokens=4)
    assert max(found[0].depths) == 3


def test_the_second_law_of_a_pass_does_not_know_the_first_token(tmp_path: Path) -> None:
    """So siblings have the same children, as probable; in the next pass they do not."""
    tree = drafted("falcon", Falcon(passes=2, breadth=3, total=200), tmp_path)
    below: dict[int, list[tuple[int, ...]]] = {1: [], 2: []}
    for node in range(1, len(tree)):
        children = tuple(
            (tree.tokens[child], round(tree.values[child] / tree.values[node], 5))
            for child in tree.tries[node]
        )
        if children and tree.depths[node] in below:
            below[tree.depths[node]].append(children)
    assert len(below[1]) == 3 and len(set(below[1])) == 1
    assert len(below[2]) == 3 and len(set(below[2])) > 1


def test_the_tree_has_the_likeliest_paths_of_all() -> None:
    (tree, *_), _ = trees(Falcon(passes=2, breadth=5, total=9), TOY, tokens=8)
    (large, *_), _ = trees(Falcon(passes=2, breadth=5, total=500), TOY, nodes=999, tokens=8)
    assert len(tree) == 10 and set(tree.sources[1:]) == {"falcon"}
    assert sorted(tree.values[1:]) == pytest.approx(sorted(large.values[1:])[-9:])


def test_nodes_of_a_block_are_given_what_its_parent_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last ask of a draft: pairs of levels have the features of the node above them."""
    seen: list[Any] = []
    right = Levels.ask_rows

    def spy(self: Levels, found: Any, frontier: Any) -> Any:
        rows = yield from right(self, found, frontier)
        seen.append(self)
        return rows

    monkeypatch.setattr(Levels, "ask_rows", spy)
    trees(Falcon(passes=3, breadth=2, total=9), TOY, tokens=20)
    levels = seen[2]
    kept: Counter[int] = Counter()
    for node in range(1, len(levels.tree)):
        above = levels.tree.parents[node]
        if levels.tree.depths[node] % 2 == 0:
            above = levels.tree.parents[above]
        assert levels.features[node - 1] is levels.left[above]
        kept[levels.tree.depths[node]] += 1
    assert kept[2] == kept[4] == 2 and max(kept) == 4


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="falcon cannot run on recurrent"):
        Falcon().bring({"target": ToyRecurrent()})
