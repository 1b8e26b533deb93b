"""Chains of drafted tokens, taken apart; how they are drawn is in test_draft.py."""

from __future__ import annotations

import torch

from foretell.core.tree import Law, TokenTree
from foretell.ops.drafting import chain_below, cut


def test_a_chain_below_a_node_keeps_laws_values_and_sources() -> None:
    tree = TokenTree(9).chain([1, 2])
    laws = [Law(torch.full((4,), 0.25)) for _ in range(3)]
    node = 0
    for token, law in zip([3, 0, 2], laws, strict=True):
        node = tree.add(node if token < 3 else 1, token, law=law, value=0.5, source="draft")
    chain = chain_below(tree, 3)
    assert chain.tokens == [3, 0, 2] and chain.laws == [None, *laws[1:]]
    assert chain.values == [1.0, 0.5, 0.5] and chain.sources == ["", "draft", "draft"]
    chain.check()
    assert chain_below(tree, 2).tokens == [2]


def test_a_cut_chain_is_another_one() -> None:
    chain = TokenTree(9).chain([1, 2, 3])
    assert cut(chain, 3) is chain and cut(chain, 9) is chain
    assert cut(chain, 1).tokens == [9, 1] and cut(chain, 0).tokens == [9]
    assert len(chain) == 4
    assert chain_below(chain, 0).tokens == chain.tokens and chain_below(chain, 0) is not chain
