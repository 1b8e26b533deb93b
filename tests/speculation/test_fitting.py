"""What a constraint does to a proposed tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.speculation.fitting import FORCED_TOKENS, fit_constraint
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.core.test_constraint import TEXTS, Listed


def context(texts: Any, limit: int = 50) -> Context:
    engine = Engine({"target": Toy(6)}, (5,))
    sampling = Sampling(constraint=texts, max_new_tokens=limit)
    return Context(engine, Request([0], Plain(), sampling))


def proposal() -> TokenTree:
    tree = TokenTree(0).chain([1, 2, 3])
    tree.chain([4, 2], at=1)
    return tree.chain([2, 1])


def test_forbidden_nodes_go_with_all_below_them() -> None:
    tree = fit_constraint(context(TEXTS), proposal(), False, False)
    tree.check()
    assert repr(tree) == "TokenTree(0: 1 (2 (3) 4))"


def test_without_a_constraint_and_where_trees_are_not_cut_they_stay() -> None:
    tree = proposal()
    assert fit_constraint(context(None), tree, False, True) is tree
    assert fit_constraint(context(TEXTS), tree, True, False) is tree
    drawn = TokenTree(0)
    drawn.add(0, 2, Law(torch.ones(1), torch.tensor([2])))
    assert fit_constraint(context(TEXTS), drawn, False, False) is drawn


def test_tokens_without_a_choice_are_drafted() -> None:
    texts = Listed([1, 2, 3, 4, 1], [1, 2, 3, 3])
    tree = fit_constraint(context(texts), TokenTree(0).chain([1, 4]), False, True)
    assert repr(tree) == "TokenTree(0: 1 (2 (3)))"
    assert tree.sources[1:] == ["", "constraint", "constraint"]
    assert fit_constraint(context(texts), TokenTree(0), False, False).tokens == [0]
    assert fit_constraint(context(texts, limit=3), TokenTree(0), False, True).tokens == [0, 1, 2]
    long = Listed([1] * 40)
    assert len(fit_constraint(context(long), TokenTree(0), False, True)) == 1 + FORCED_TOKENS


def test_a_model_without_trees_gets_a_chain() -> None:
    ctx = context(Listed([1, 2, 3]))
    ctx.models["target"].caps = frozenset({"rows"})
    assert fit_constraint(ctx, TokenTree(0), False, True).is_chain
    drawn = TokenTree(0)
    drawn.add(0, 2, Law(torch.ones(1), torch.tensor([2])))
    assert len(fit_constraint(ctx, drawn, False, True)) == 2


@pytest.mark.parametrize("spec", ["ngram:k=4,nodes=6", "draft:length=3", "lookahead"])
def test_it_changes_no_law_and_saves_work(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact with it and without, and with it more is accepted of less."""
    setting = laws.formed("(b(a|cb)|c|ab?)+", 3, temperature=1.0)
    shares = []
    for change in (fit_constraint, lambda ctx, tree, whole, free: tree):
        monkeypatch.setattr("foretell.speculation.strategy.fit_constraint", change)
        law = laws.check_law(laws.build(spec), setting)
        shares.append(law.accepted / law.drafted)
    assert shares[0] >= shares[1]
