"""Trees of a head against a search over all paths."""

from __future__ import annotations

import itertools

import pytest
import torch

from foretell.core.tree import TokenTree
from foretell.drafters.heads.eagle3 import Eagle3
from foretell.drafters.heads.head_tree import Candidate, best_tree, followed_candidates
from foretell.testing.toy import Toy
from tests.drafters.heads.networks.driving import trees

VOCAB, DEPTH = 4, 3
TOY = Toy(VOCAB, seed=2, sharpness=3.0)


def every_path(text: list[int], tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The probability of each path in the tree by the head's own rows: its toy is the target's
    relative, so the values of the tree tell them.
    """
    found = {}
    for node in range(1, len(tree)):
        found[tuple(tree.tokens_to(node))] = tree.values[node]
    return found


def test_growing_misses_nothing_where_every_node_has_all_children() -> None:
    """With a breadth of all nodes the best of the whole tree are chosen."""
    breadth = VOCAB**DEPTH
    shape = {"depth": DEPTH, "breadth": min(64, breadth), "total": 200}
    (whole, *_), _ = trees(Eagle3(**shape), TOY, nodes=300)
    assert len(whole) - 1 == sum(VOCAB**level for level in range(1, DEPTH + 1))
    values = every_path([1, 2, 3], whole)
    for path in itertools.product(range(VOCAB), repeat=DEPTH):
        assert path in values
    for path, value in values.items():
        below = [values[(*path, token)] for token in range(VOCAB) if (*path, token) in values]
        assert not below or sum(below) == pytest.approx(value, rel=1e-6)
    (best, *_), _ = trees(Eagle3(**{**shape, "total": 7}), TOY, nodes=300)
    want = sorted(values, key=lambda path: -values[path])[:7]
    assert {tuple(best.tokens_to(node)) for node in range(1, len(best))} == set(want)


def test_a_narrow_one_follows_the_likeliest_path() -> None:
    (chain, *_), calls = trees(Eagle3(depth=3, breadth=1, total=3), TOY)
    assert chain.is_chain and len(chain) == 4 and calls["head"] >= 3
    (whole, *_), _ = trees(Eagle3(depth=3, breadth=64, total=200), TOY, nodes=300)
    values = every_path([], whole)
    path: tuple[int, ...] = ()
    for _ in range(3):
        path = max(((*path, token) for token in range(VOCAB)), key=lambda one: values[one])
    assert tuple(chain.tokens_to(3)) == path


def test_levels_end_where_no_path_is_likely() -> None:
    (deep, *_), _ = trees(Eagle3(depth=6, breadth=1, total=6), TOY, tokens=12)
    (short, *_), _ = trees(Eagle3(depth=6, breadth=1, total=6, least=0.999), TOY, tokens=12)
    assert len(deep) == 7 and len(short) == 2


class Ending:
    """A context whose texts end with token 9."""

    tokens = (1, 2)

    def ends(self, tree: TokenTree, node: int) -> bool:
        return tree.tokens[node] == 9


def test_nothing_is_drafted_behind_an_end() -> None:
    found = followed_candidates([(9, 0.6, -1), (3, 0.4, -1), (5, 0.9, 0), (6, 0.9, 1)])
    assert [one.total for one in found] == pytest.approx([0.6, 0.4, 0.54, 0.36])
    assert [one.level for one in found] == [0, 0, 1, 1]
    tree = best_tree(Ending(), found, 4, "it")  # type: ignore[arg-type]
    assert repr(tree) == "TokenTree(2: 9 3 (6))"


def test_parents_are_chosen_before_their_children() -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(50):
        found: list[Candidate] = []
        for number in range(30):
            parent = int(torch.randint(-1, number, (1,), generator=draw)) if number else -1
            chance = float(torch.rand(1, generator=draw))
            total = chance * (found[parent].total if parent >= 0 else 1.0)
            level = found[parent].level + 1 if parent >= 0 else 0
            found.append(Candidate(10 + number, parent, chance, total, level))
        tree = best_tree(Ending(), found, 9, "it")  # type: ignore[arg-type]
        tree.check()
        best = sorted((one.total for one in found), reverse=True)[:9]
        assert sorted(tree.values[1:], reverse=True) == pytest.approx(best)
