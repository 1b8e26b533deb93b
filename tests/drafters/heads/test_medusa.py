"""Medusa: the tree of the ranks that are right most often; its exactness is in test_laws.py, its
network in tests/heads.
"""

from __future__ import annotations

import pytest

from foretell.core.tree import TokenTree
from foretell.drafters.heads.medusa import USUAL, Medusa
from foretell.drafters.heads.networks.ranks import best_paths, path_probability
from foretell.errors import Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees

SPECS = ["medusa:total=2", "medusa:total=5"]
TOY = Toy(12, seed=2, sharpness=6.0)


def by_depth(tree: TokenTree) -> list[list[int]]:
    """Of each depth the tokens in the order in which they were added, each once."""
    deepest = max(tree.depths)
    return [
        list(dict.fromkeys(t for t, d in zip(tree.tokens, tree.depths, strict=True) if d == depth))
        for depth in range(1, deepest + 1)
    ]


def test_one_forward_drafts_the_best_places_of_the_usual_shares() -> None:
    seen, calls = trees(Medusa(total=20), TOY, tokens=9)
    tree = seen[0]
    assert calls["head"] == len(seen)
    places = best_paths(USUAL[:3], 20)  # a toy has three laws
    assert len(tree) == 21 and len(places) == 20
    assert tree.values[1:] == pytest.approx([path_probability(USUAL, place) for place in places])
    assert tree.depths[1:] == [len(place) for place in places]


def test_a_token_is_that_of_its_rank_whatever_stands_above_it() -> None:
    (tree, *_), _ = trees(Medusa(total=20), TOY, tokens=9)
    ranked = by_depth(tree)
    for node in range(len(tree)):
        below = [tree.tokens[child] for child in tree.tries[node]]
        assert not below or below == ranked[tree.depths[node]][: len(below)]


def test_a_small_budget_keeps_the_best() -> None:
    (large, *_), _ = trees(Medusa(total=20), TOY)
    (small, *_), _ = trees(Medusa(total=20), TOY, nodes=4)
    assert small.values == large.values[:5] and small.tokens == large.tokens[:5]


def test_it_drafts_the_same_at_any_temperature() -> None:
    (cold, *_), _ = trees(Medusa(total=6), TOY)
    (warm, *_), _ = trees(Medusa(total=6), TOY, temperature=1.0, seed=3)
    assert repr(cold) == repr(warm) and not any(warm.laws)


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="medusa cannot run on recurrent"):
        Medusa().bring({"target": ToyRecurrent()})
