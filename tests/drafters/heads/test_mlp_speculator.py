"""The MLP speculator: the likeliest suffixes of a tree of ranks; its exactness is in test_laws.py,
its network in tests/heads.
"""

from __future__ import annotations

import pytest

from foretell.core.tree import TokenTree
from foretell.drafters.heads.mlp_speculator import MlpSpeculator
from foretell.errors import BadConfig, Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees

SPECS = ["mlp-speculator:children=2 2,suffixes=2", "mlp-speculator:children=2 1 1"]
TOY = Toy(5, seed=2, sharpness=3.0)


def suffixes(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The paths to the leaves, and what they are worth."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    leaves = set(range(1, len(tree))) - set(tree.parents)
    return {paths[leaf]: tree.values[leaf] or 0.0 for leaf in leaves}


def test_the_likeliest_suffixes_are_kept_whole() -> None:
    """Against all suffixes, sorted."""
    (every, *_), calls = trees(MlpSpeculator(children=(3, 2, 2), suffixes=12), TOY, tokens=8)
    all_of_them = suffixes(every)
    assert len(all_of_them) == 12 and calls["head"] >= 3
    for count in (1, 4):
        (tree, *_), _ = trees(MlpSpeculator(children=(3, 2, 2), suffixes=count), TOY, tokens=8)
        best = sorted(all_of_them, key=lambda path: -all_of_them[path])[:count]
        assert suffixes(tree) == {path: all_of_them[path] for path in best}
        assert len(tree) <= 1 + 3 * count


def test_a_small_budget_cuts_the_last_suffix_short() -> None:
    drafter = MlpSpeculator(children=(3, 2, 2), suffixes=4)
    (tree, *_), _ = trees(drafter, TOY, nodes=4)
    (smaller, *_), _ = trees(drafter, TOY, nodes=2)
    (whole, *_), _ = trees(MlpSpeculator(children=(3, 2, 2), suffixes=1), TOY)
    (best,) = suffixes(whole)
    assert best in suffixes(tree) and len(tree) == 5
    assert suffixes(smaller).keys() == {best[:2]}


@pytest.mark.parametrize("children", [(), (0,), (2, 0), (32, 32), (1,) * 65])
def test_children_out_of_range_are_refused(children: tuple[int, ...]) -> None:
    with pytest.raises(BadConfig, match="mlp-speculator:children"):
        MlpSpeculator(children=children)


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="mlp-speculator cannot run on recurrent"):
        MlpSpeculator().bring({"target": ToyRecurrent()})
