"""Trees grown best first and trees merged."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import grow_tree, merge_trees, plant_tree, subtree_below
from tests.core.test_tree import Path, closure, content, paths, planted


@given(paths, paths)
def test_merging_fixed_trees_is_the_union_of_their_texts(a: list[Path], b: list[Path]) -> None:
    merged = merge_trees(planted(a), planted(b))
    assert content(merged) == list(dict.fromkeys([*closure(a), *closure(b)]))


@given(
    st.dictionaries(
        st.integers(0, 4),
        st.lists(
            st.tuples(st.integers(0, 4), st.floats(0.01, 1)), max_size=4, unique_by=lambda x: x[0]
        ),
    ),
    st.integers(1, 12),
    st.integers(0, 4),
)
def test_growing_best_first_finds_the_best_tree_of_every_size(
    table: dict[int, list[tuple[int, float]]], size: int, depth: int
) -> None:
    table = {token: sorted(options, key=lambda o: -o[1]) for token, options in table.items()}
    tree = grow_tree(0, lambda tree, node: table.get(tree.tokens[node], ()), size, depth, "me")
    tree.check()
    every: list[float] = []
    stack = [(0, 1.0, 0)]
    while stack:
        token, value, level = stack.pop()
        for following, chance in table.get(token, ()) if level < depth else ():
            every.append(value * chance)
            stack.append((following, value * chance, level + 1))
    assert tree.values[1:] == pytest.approx(sorted(every, reverse=True)[: size - 1])
    assert max(tree.depths) <= depth and set(tree.sources[1:]) <= {"me"}


def test_drawn_children_come_before_fixed_ones_after_a_merge() -> None:
    law = Law(torch.tensor([0.2, 0.3, 0.5]))
    drawn = TokenTree(9)
    two = drawn.add(0, 2, law=law, value=0.5)
    drawn.add(two, 0, law=law, value=0.1)
    drawn.add(0, 1, law=law, value=0.3)
    drawn.add(0, 2, law=law, value=0.5)
    both = merge_trees(planted([(1, 0), (0, 2), (2,)]), drawn)
    both.check()
    names = [both.tokens[t] for t in both.tries[0]]
    assert names == [2, 1, 2, 0] and [both.laws[t] is law for t in both.tries[0]] == [
        True,
        True,
        True,
        False,
    ]
    assert set(content(both)) == {(1,), (1, 0), (0,), (0, 2), (2,), (2, 0)}
    with pytest.raises(ValueError, match="cannot be combined"):
        merge_trees(both, drawn)


def test_values_and_sources_stay_with_their_nodes() -> None:
    tree = TokenTree(5)
    for token, value in zip((1, 2, 3), (0.5, 0.25, 0.125), strict=True):
        tree.add(token - 1, token, value=value, source=f"s{token}")
    merged = merge_trees(TokenTree(5).chain([7]), tree)
    where = {merged.tokens[n]: (merged.values[n], merged.sources[n]) for n in range(1, len(merged))}
    assert {t: where[t] for t in (1, 2, 3)} == {1: (0.5, "s1"), 2: (0.25, "s2"), 3: (0.125, "s3")}


def test_what_both_trees_hold_has_both_for_its_source() -> None:
    merged = merge_trees(
        TokenTree(5).chain([1, 2], "a", match=2), TokenTree(5).chain([1, 3], "b", match=4)
    )
    assert dict(zip(merged.tokens, merged.sources, strict=True)) == {
        5: "",
        1: "a+b",
        2: "a",
        3: "b",
    }
    assert dict(zip(merged.tokens, merged.matches, strict=True)) == {5: 0, 1: 4, 2: 2, 3: 4}
    assert merge_trees(merged, TokenTree(5).chain([1], "a")).sources[1] == "a+b"


@given(paths)
def test_planting_at_once_is_adding_one_by_one(texts: list[Path]) -> None:
    want = TokenTree(9)
    for path in closure(texts):
        at = 0
        for token in path[:-1]:
            at = want.find_child(at, token)
        want.add(at, path[-1], value=1 / len(path), source="me", match=3)
    tree = plant_tree(9, want.parents[1:], want.tokens[1:], want.values[1:], "me", 3)
    assert all(getattr(tree, name) == getattr(want, name) for name in TokenTree.__slots__)


def test_successors_are_read_only_as_far_as_the_tree_needs() -> None:
    read: list[int] = []

    def successors(tree: TokenTree, node: int) -> Iterator[tuple[int, float]]:
        for token in range(5):
            read.append(node)
            yield token, 0.5 / (token + 1)

    assert grow_tree(0, successors, 3).parents == [-1, 0, 0] and read == [0, 0, 1, 0, 2]
    assert grow_tree(0, lambda tree, node: [(7, 0.5), (7, 0.4), (8, 0.1)], 4, 1).tokens == [
        0,
        7,
        8,
    ], "a token stands once"


def test_the_tree_below_a_node_is_its_part_of_the_tree() -> None:
    draw = random.Random(3)
    for _ in range(50):
        tree = TokenTree(9)
        for _ in range(12):
            law = Law(torch.ones(4) / 4) if draw.random() < 0.5 else None
            tree.add(draw.randrange(len(tree)), draw.randrange(4), law)
        for node in range(len(tree)):
            part, places = subtree_below(tree, node)
            want = [n for n in range(len(tree)) if node in (0, n, *tree.path(n))]
            if node == 0:
                assert part is tree
            assert places == want
            for new, old in enumerate(places):
                assert part.tokens[new] == tree.tokens[old]
                assert part.tokens_to(new) == tree.tokens_to(old)[tree.depths[node] :]
                assert part.depths[new] == len(part.path(new))
                assert [places[child] for child in part.tries[new]] == tree.tries[old]
                assert part.laws[new] is (tree.laws[old] if new else None)
