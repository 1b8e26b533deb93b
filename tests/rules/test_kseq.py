"""k-sequential selection on tables: the law, the bound of the paper, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from foretell.core.tree import Law, TokenTree
from foretell.rules.kseq import Kseq
from tests.rules.tables import chain, copies, over_drafts, plain, table, without


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_law_of_several_drafts(seed: int, count: int) -> None:
    p, q = table(seed, 3), table(seed + 60, 3, zeros=seed % 2 == 1)
    assert over_drafts(Kseq(), copies(q, 1, count), p, 2)[0] == pytest.approx(plain(p, 2), abs=1e-9)


def test_the_law_of_two_levels() -> None:
    p, q = table(7, 3), table(67, 3)
    assert over_drafts(Kseq(), copies(q, 2, 2), p, 3)[0] == pytest.approx(plain(p, 3), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_grows_with_drafts_and_one_draft_is_the_overlap(seed: int) -> None:
    p, q = table(seed, 4), table(seed + 60, 4)
    one, two, three = (over_drafts(Kseq(), copies(q, 1, k), p, 1)[1] for k in (1, 2, 3))
    assert one == pytest.approx(float(torch.minimum(p(()), q(())).sum()), abs=1e-9)
    assert one - 1e-9 <= two <= three + 1e-9


def test_equal_laws_are_always_accepted() -> None:
    p = table(9, 3)
    outputs, accepted = over_drafts(Kseq(), chain(p, 2), p, 2)
    assert accepted == pytest.approx(2, abs=1e-9) and outputs == pytest.approx(
        plain(p, 2), abs=1e-9
    )


def test_only_independent_draws_of_one_law_are_for_it() -> None:
    tree, law = TokenTree(0), Law(torch.tensor([0.5, 0.3, 0.2]))
    tree.add(0, 1, law=law, value=0.5)
    tree.add(0, 1, law=law, value=0.5)
    assert Kseq().accepts(tree)
    tree.add(0, 2, law=without(law, [1]), value=0.5)
    assert not Kseq().accepts(tree) and not Kseq().accepts(TokenTree(0).chain([1]))
