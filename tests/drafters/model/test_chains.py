"""drafters/model/chains.py: chains that are drawn independently keep their number, whatever they
share; what `draft` and `spectr` draw is tested with them.
"""

from __future__ import annotations

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Reply, Sampling
from foretell.drafters.model.chains import chain_below, cut_chain, draw_chains
from foretell.drafters.model.reader import DraftReader
from foretell.engine.engine import Engine
from foretell.strategies.plain import Plain
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy

PROMPT = [0, 1, 2]
TOY = Toy(3, seed=4, sharpness=3.0)
SAMPLING = Sampling(temperature=0.8, max_new_tokens=9, frequency_penalty=0.3)


def drawn(door: Enumerator, chains: int, length: int, budget: int) -> tuple[TokenTree, Context]:
    request = Request(PROMPT, Plain(), SAMPLING, rng=door)
    ctx = Context(Engine({"target": TOY, "draft": TOY}), request)
    tree = TokenTree(PROMPT[-1])
    steps = draw_chains(ctx, DraftReader(ctx), tree, chains, length, budget, "chains")
    reply = None
    while True:
        try:
            ask = steps.send(reply)
        except StopIteration:
            return tree, ctx
        nodes = list(ask.rows or ())
        reply = Reply(TOY.score(PROMPT, ask.tree)[nodes], {}, nodes)


def test_every_outcome_is_as_likely_as_the_product_of_its_draws() -> None:
    """Each try is one draw from its node's law: a token drawn twice counts twice."""
    total = 0.0
    shared = 0
    walk = Enumerator.walk_outcomes(lambda door: drawn(door, chains=2, length=2, budget=9))
    for weight, (tree, ctx) in walk:
        tree.check()
        rows = TOY.score(PROMPT, tree)
        product = 1.0
        for node, tries in enumerate(tree.tries):
            law = ctx.sampler.law(rows[node], tree.tokens_to(node))
            for child in tries:
                product *= float(law[tree.tokens[child]])
                assert tree.laws[child].probs.tolist() == pytest.approx(law.tolist())  # type: ignore[union-attr]
        assert len(tree.tries[0]) == 2
        assert sum(len(tree.tries[child]) for child in set(tree.tries[0])) == 2
        assert weight == pytest.approx(product, abs=1e-12)
        total += weight
        shared += len(set(tree.tries[0])) == 1
    assert total == pytest.approx(1) and shared


def test_a_level_that_could_exceed_the_budget_is_not_begun() -> None:
    for budget, depth in ((3, 1), (4, 1), (5, 2), (9, 3)):
        walk = Enumerator.walk_outcomes(lambda door: drawn(door, 2, 3, budget)[0])  # noqa: B023
        deepest = set()
        for count, (_, tree) in enumerate(walk):
            assert len(tree) <= budget
            deepest.add(max(tree.depths))
            if count > 200:
                break
        assert max(deepest) >= depth


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
    assert cut_chain(chain, 3) is chain and cut_chain(chain, 9) is chain
    assert cut_chain(chain, 1).tokens == [9, 1] and cut_chain(chain, 0).tokens == [9]
    assert len(chain) == 4
    assert chain_below(chain, 0).tokens == chain.tokens and chain_below(chain, 0) is not chain
