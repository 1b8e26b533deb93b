"""Tokens drawn without replacement, and the best ones."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.model.without_replacement import Urn, best_tokens, likeliest_tokens
from foretell.engine.engine import Engine
from foretell.strategies.plain import Plain
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy

LAW = [0.45, 0.05, 0.0, 0.3, 0.2]


def test_tokens_come_in_the_law_and_the_order_of_gumbel_top_k() -> None:
    def once(door: Enumerator) -> tuple[int, ...]:
        ctx = Context(
            Engine({"target": Toy(5)}), Request([1], Plain(), Sampling(temperature=1.0), rng=door)
        )
        urn, tree = Urn(torch.tensor(LAW, dtype=torch.float64)), TokenTree(1)
        nodes = [urn.add_draw(ctx, tree, 0, key, "me") for key in range(1, 4)]
        tokens = tuple(tree.tokens[node] for node in nodes)
        rest = list(LAW)
        for node in nodes:
            law = tree.laws[node]
            assert law is not None
            assert law.probs.tolist() == pytest.approx([q / sum(rest) for q in rest], abs=1e-12)
            assert tree.values[node] == pytest.approx(LAW[tree.tokens[node]])
            rest[tree.tokens[node]] = 0.0
        assert urn.left == pytest.approx(sum(rest))
        return tokens

    found = {tokens: weight for weight, tokens in Enumerator.walk_outcomes(once)}
    assert set(found) == set(permutations([0, 1, 3, 4], 3))
    for (a, b, c), weight in found.items():
        want = LAW[a] * LAW[b] / (1 - LAW[a]) * LAW[c] / (1 - LAW[a] - LAW[b])
        assert weight == pytest.approx(want, abs=1e-12)


def test_an_empty_urn_says_so_and_keeps_the_law_that_it_was_given() -> None:
    q = torch.tensor([0.0, 1.0, 0.0])
    ctx = Context(Engine({"target": Toy(3)}), Request([1], Plain(), Sampling(temperature=1.0)))
    urn = Urn(q)
    urn.add_draw(ctx, TokenTree(1), 0, 1, "me")
    assert urn.left == 0 and q.tolist() == [0.0, 1.0, 0.0]


def test_the_best_tokens_are_possible_ones_with_ties_to_the_lowest_id() -> None:
    scores = torch.tensor([1.0, 3.0, -torch.inf, 1.0, 3.0])
    ids = [token for token, _ in best_tokens(scores, 9)]
    assert ids == [1, 4, 0, 3]
    assert sum(chance for _, chance in best_tokens(scores, 9)) == pytest.approx(1)
    assert best_tokens(scores, 1)[0][0] == 1


def test_what_an_urn_is_without_is_never_drawn() -> None:
    q = torch.tensor(LAW, dtype=torch.float64)

    def once(door: Enumerator) -> int:
        request = Request([1], Plain(), Sampling(temperature=1.0), rng=door)
        ctx = Context(Engine({"target": Toy(5)}), request)
        urn, tree = Urn(q, [0, 1]), TokenTree(1)
        assert urn.left == pytest.approx(0.5)
        return tree.tokens[urn.add_draw(ctx, tree, 0, 1, "me")]

    found = {token: weight for weight, token in Enumerator.walk_outcomes(once)}
    assert found == pytest.approx({3: 0.6, 4: 0.4})
    assert Urn(q, [0, 1, 3, 4]).left == 0


def test_of_equal_chances_the_lowest_ids_are_the_likeliest() -> None:
    law = torch.tensor([0.1, 0.25, 0.1, 0.25, 0.1, 0.0, 0.2])
    assert [token for token, _ in likeliest_tokens(law, 4)] == [1, 3, 6, 0]
    assert [token for token, _ in likeliest_tokens(law, 99)] == [1, 3, 6, 0, 2, 4]
    assert likeliest_tokens(law, 0) == []
