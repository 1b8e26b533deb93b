"""Token trees and laws against twins made of dictionaries and loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.tree import NEXT, Law, TokenTree

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
    return [tuple(tree.tokens_to(n)) for n in range(1, len(tree))]


@given(paths)
def test_adding_texts_gives_their_prefixes(texts: list[Path]) -> None:
    tree = planted(texts)
    assert content(tree) == closure(texts)
    for node, words in enumerate(content(tree), 1):
        assert tree.depths[node] == len(words) and tree.path(node)[-1] == node
        for token in range(4):
            child = tree.find_child(node, token)
            assert (child >= 0) == ((*words, token) in closure(texts))
    assert tree.is_chain == all(
        len({p[n] for p in closure(texts) if p[:n] == stem and len(p) > n}) <= 1
        for n in range(4)
        for stem in {p[:n] for p in closure(texts)}
    )
    assert not tree.has_draws


@given(paths, st.sets(st.integers(1, 12)))
def test_keeping_some_nodes_keeps_their_texts_and_the_original(
    texts: list[Path], chosen: set[int]
) -> None:
    tree = planted(texts)
    nodes = sorted({n for c in chosen if c < len(tree) for n in tree.path(c)})
    small = tree.keep(nodes)
    assert content(small) == [tuple(tree.tokens_to(n)) for n in nodes] and content(tree) == closure(
        texts
    )
    if small is not tree:
        small.chain([3, 3, 3])
    assert content(tree) == closure(texts), "the original changed with its copy"


def test_a_token_drawn_again_is_one_more_try_of_one_node() -> None:
    law, tree = Law(torch.tensor([0.5, 0.5])), TokenTree(0)
    a, b, c = tree.add(0, 1, law), tree.add(0, 0, law), tree.add(0, 1, law)
    assert (a, b, c) == (1, 2, 1) and tree.tries[0] == [1, 2, 1] and len(tree) == 3
    assert tree.add(0, 0) == 2 and tree.tries[0] == [1, 2, 1], (
        "a fixed child is covered by the drawn one"
    )
    assert tree.has_draws
    tree.check()


def test_a_drawn_tree_is_not_cut() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, Law(torch.tensor([0.5, 0.5])))
    with pytest.raises(AssertionError, match="drawn"):
        tree.keep([])
    assert tree.keep([1]) is tree


def test_check_tells_what_is_wrong() -> None:
    law = Law(torch.tensor([0.5, 0.5]))
    late = planted([(1,)])
    late.add(0, 0, law)
    with pytest.raises(AssertionError, match="a drawn child is tried after"):
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
        assert [law.token_prob(t) for t in range(vocab)] == pytest.approx([*p.tolist(), 0, 0])
        assert law.dense(vocab).tolist() == pytest.approx([*p.tolist(), 0, 0])
        assert law.dense(len(p)).tolist() == pytest.approx(p.tolist())
    assert dense.dense(1).tolist() == pytest.approx(p[:1].tolist()), (
        "a draft vocabulary may be the larger one"
    )


def test_a_node_without_an_estimate_inherits_one() -> None:
    """With 0 the policy would cut a newcomer's drafts without a word."""
    tree = TokenTree(0)
    first = tree.add(0, 1)
    second = tree.add(first, 2)
    sure = tree.add(second, 3, value=0.5)
    below = tree.add(sure, 4)
    assert tree.values == [1.0, NEXT, NEXT**2, 0.5, 0.5 * NEXT]
    assert tree.chain([5], at=below).values[-1] == 0.5 * NEXT**2


def test_a_tree_shows_its_branches() -> None:
    tree = TokenTree(5).chain([17, 3]).chain([17, 8]).chain([4])
    assert repr(tree) == "TokenTree(5: 17 (3 8) 4)"
    assert repr(TokenTree(5)) == "TokenTree(5: no drafts)"


def test_a_tree_below_another_token_is_the_same_tree() -> None:
    tree = TokenTree(5).chain([1, 2])
    other = tree.reroot_at(6)
    assert tree.reroot_at(5) is tree and other.tokens == [6, 1, 2] and tree.tokens == [5, 1, 2]
    assert other.tries is tree.tries and other.parents is tree.parents
