"""Block verification on tables: the law, and never fewer accepted tokens than token by token."""

from __future__ import annotations

import pytest
import torch

from foretell.core.tree import Law, TokenTree
from foretell.verification.block import Block
from foretell.verification.sequential import Sequential
from tests.verification.tables import chain, over_drafts, plain, table


@pytest.mark.parametrize("seed", range(5))
def test_the_law_and_no_fewer_tokens_than_sequential(seed: int) -> None:
    p, q = table(seed, 3), table(seed + 40, 3, zeros=seed % 2 == 1)
    outputs, accepted = over_drafts(Block(), chain(q, 3), p, 4)
    assert outputs == pytest.approx(plain(p, 4), abs=1e-12)
    assert accepted >= over_drafts(Sequential(), chain(q, 3), p, 4)[1] - 1e-12


def test_it_does_accept_more_somewhere() -> None:
    p, q = table(1, 3), table(41, 3)
    assert (
        over_drafts(Block(), chain(q, 3), p, 4)[1]
        > over_drafts(Sequential(), chain(q, 3), p, 4)[1] + 1e-3
    )


def test_equal_laws_are_always_accepted() -> None:
    p = table(9, 3)
    assert over_drafts(Block(), chain(p, 2), p, 2)[1] == pytest.approx(2, abs=1e-12)


def test_only_drawn_chains_are_for_it() -> None:
    law = Law(torch.tensor([0.5, 0.5]))
    tree = TokenTree(0)
    tree.add(0, 1, law=law, value=0.5)
    assert Block().can_verify(tree) and Block().can_verify(TokenTree(0))
    tree.add(0, 0, law=law, value=0.5)
    assert not Block().can_verify(tree) and not Block().can_verify(TokenTree(0).chain([1]))
