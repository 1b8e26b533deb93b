"""k-sequential selection on tables: the law, the bound of the paper, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.spec import resolve_method
from foretell.testing.toy import Toy
from foretell.verification.kseq import Kseq
from tests.verification.tables import chain, copies, over_drafts, plain, table, without


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
    assert Kseq().can_verify(tree)
    tree.add(0, 2, law=without(law, [1]), value=0.5)
    assert not Kseq().can_verify(tree) and not Kseq().can_verify(TokenTree(0).chain([1]))


@pytest.mark.parametrize("rule", ["kseq", "block", "augmented"])
def test_without_draws_it_is_refused_before_anything_runs(rule: str) -> None:
    strategy = resolve_method(f"ngram:rule={rule}")[1]
    engine = Engine({"target": Toy(8)})
    request = Request([1, 2, 3], strategy, Sampling(temperature=1.0, max_new_tokens=4))
    ctx = Context(engine, request, engine.models)
    with pytest.raises(BadConfig, match=f"rule '{rule}' cannot verify.*these are not drawn"):
        strategy.run(ctx)
    # Greedily it is the walk, of any tree.
    engine.add(Request([1, 2, 3], strategy, Sampling(max_new_tokens=4)))
    assert [event.done for event in engine.run() if event.done] == ["length"]
