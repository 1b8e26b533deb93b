"""Token trees and laws against twins made of dictionaries and loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.tree import Law, TokenTree, ancestors, grow

Path = tuple[int, ...]
paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=8)


def planted(texts: list[Path]) -> TokenTree:
    tree = TokenTree(9)
    for text in texts:
        tree.chain(text)
    return tree


def closure(texts: list[Path]) -> list[Path]:
    """Every prefix once, in the order of first appearance."""
    return list(dict.fromkeys(text[:n] for text in texts for n in range(1, len(text) + 1)))


def content(tree: TokenTree) -> list[Path]:
    tree.check()
    return [tuple(tree.words(n)) for n in range(1, len(tree))]


@given(paths)
def test_adding_texts_gives_their_prefixes(texts: list[Path]) -> None:
    tree = planted(texts)
    assert content(tree) == closure(texts)
    for node, words in enumerate(content(tree), 1):
        assert tree.depths[node] == len(words) and tree.path(node)[-1] == node
        for token in range(4):
            child = tree.child(node, token)
            assert (child >= 0) == ((*words, token) in closure(texts))
    assert tree.is_chain == all(len({p[n] for p in closure(texts) if p[:n] == stem and len(p) > n}) <= 1
                                for n in range(4) for stem in {p[:n] for p in closure(texts)})  # fmt: skip
    assert not tree.drawn


@given(paths, paths)
def test_merging_fixed_trees_is_the_union_of_their_texts(a: list[Path], b: list[Path]) -> None:
    merged = planted(a).merge(planted(b))
    assert content(merged) == list(dict.fromkeys([*closure(a), *closure(b)]))


@given(paths, st.integers(1, 12))
def test_pruning_keeps_the_first_nodes_and_the_original(texts: list[Path], size: int) -> None:
    tree = planted(texts)
    small = tree.prune(size)
    assert content(small) == closure(texts)[: size - 1] and content(tree) == closure(texts)
    if small is not tree:
        small.chain([3, 3, 3])
    assert content(tree) == closure(texts), "the original changed with its copy"


@given(st.integers(1, 14).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))))
def test_ancestors_follow_parents(parents: tuple[int, ...]) -> None:
    mask = ancestors(parents)
    for node in range(len(parents)):
        seen, at = set(), node
        while at >= 0:
            seen.add(at)
            at = parents[at]
        assert set(mask[node].nonzero().flatten().tolist()) == seen


@given(st.dictionaries(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 4), st.floats(0.01, 1)), max_size=4,
                       unique_by=lambda x: x[0])), st.integers(1, 12), st.integers(0, 4))  # fmt: skip
def test_growing_best_first_finds_the_best_tree_of_every_size(table: dict[int, list[tuple[int, float]]], size: int,
                                                              depth: int) -> None:  # fmt: skip
    table = {token: sorted(options, key=lambda o: -o[1]) for token, options in table.items()}
    tree = grow(0, lambda tree, node: table.get(tree.tokens[node], ()), size, depth, "me")
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


def test_a_token_drawn_again_is_one_more_try_of_one_node() -> None:
    law, tree = Law(torch.tensor([0.5, 0.5])), TokenTree(0)
    a, b, c = tree.add(0, 1, law), tree.add(0, 0, law), tree.add(0, 1, law)
    assert (a, b, c) == (1, 2, 1) and tree.tries[0] == [1, 2, 1] and len(tree) == 3
    assert tree.add(0, 0) == 2 and tree.tries[0] == [1, 2, 1], "a fixed child is covered by the drawn one"
    assert tree.drawn
    tree.check()


def test_drawn_children_come_before_fixed_ones_after_a_merge() -> None:
    law = Law(torch.tensor([0.2, 0.3, 0.5]))
    drawn = TokenTree(9)
    drawn.add(drawn.add(0, 2, law), 0, law)
    drawn.add(0, 1, law)
    drawn.add(0, 2, law)
    both = planted([(1, 0), (0, 2), (2,)]).merge(drawn)
    both.check()
    names = [both.tokens[t] for t in both.tries[0]]
    assert names == [2, 1, 2, 0] and [both.laws[t] is law for t in both.tries[0]] == [True, True, True, False]
    assert set(content(both)) == {(1,), (1, 0), (0,), (0, 2), (2,), (2, 0)}
    with pytest.raises(ValueError, match="cannot be combined"):
        both.merge(drawn)


def test_a_drawn_tree_is_not_pruned() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, Law(torch.tensor([0.5, 0.5])))
    with pytest.raises(AssertionError, match="drawn"):
        tree.prune(1)
    assert tree.prune(2) is tree


def test_check_tells_what_is_wrong() -> None:
    law = Law(torch.tensor([0.5, 0.5]))
    late = planted([(1,)])
    late.add(0, 0, law)
    with pytest.raises(AssertionError, match="deterministic child is tried before"):
        late.check()
    lost = planted([(1, 2)])
    lost.tries[1] = []
    with pytest.raises(AssertionError, match="nobody's child"):
        lost.check()
    twice = planted([(1,), (2,)])
    twice.tokens[2] = 1
    with pytest.raises(AssertionError, match="same child twice"):
        twice.check()


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.booleans())
def test_laws_dense_and_sparse_say_the_same(weights: list[float], shuffled: bool) -> None:
    p = torch.tensor(weights, dtype=torch.float64)
    p /= p.sum()
    order = torch.arange(len(p)).flip(0) if shuffled else torch.arange(len(p))
    vocab = len(p) + 2
    dense, sparse = Law(p), Law(p[order], order)
    for law in (dense, sparse):
        assert [law.prob(t) for t in range(vocab)] == pytest.approx([*p.tolist(), 0, 0])
        assert law.dense(vocab).tolist() == pytest.approx([*p.tolist(), 0, 0])
        assert law.dense(len(p)).tolist() == pytest.approx(p.tolist())
    assert dense.dense(1).tolist() == pytest.approx(p[:1].tolist()), "a draft vocabulary may be the larger one"


def test_values_and_sources_stay_with_their_nodes() -> None:
    tree = TokenTree(5)
    for token, value in zip((1, 2, 3), (0.5, 0.25, 0.125), strict=True):
        tree.add(token - 1, token, value=value, source=f"s{token}")
    merged = TokenTree(5).chain([7]).merge(tree)
    where = {merged.tokens[n]: (merged.values[n], merged.sources[n]) for n in range(1, len(merged))}
    assert {t: where[t] for t in (1, 2, 3)} == {1: (0.5, "s1"), 2: (0.25, "s2"), 3: (0.125, "s3")}
