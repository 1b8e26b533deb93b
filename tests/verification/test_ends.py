"""Below a token that ends the text no rule asks for a law, and the law of ended texts stays."""

from __future__ import annotations

import pytest
import torch

from foretell.core.distribution import Target
from foretell.core.random import Rng
from foretell.core.tree import Law, TokenTree
from foretell.verification.acceptance import Rule
from foretell.verification.block import Block
from foretell.verification.coin import Coin
from foretell.verification.kseq import Kseq
from foretell.verification.synthetic import Synthetic
from foretell.verification.typical import Typical
from tests.verification.tables import (
    chain,
    copies,
    enumerate_rule,
    joint,
    over_drafts,
    plain,
    table,
    target,
)

STOPS = (1,)


@pytest.mark.parametrize("seed", range(6))
def test_block_keeps_the_law_of_texts_that_end_inside_its_chain(seed: int) -> None:
    p, q = table(seed, 3), table(seed + 40, 3, zeros=seed % 2 == 1)
    outputs, _ = over_drafts(Block(), chain(q, 3), p, 4, STOPS)
    assert outputs == pytest.approx(plain(p, 4, STOPS), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_kseq_keeps_the_law_of_texts_that_end_inside_its_tree(seed: int) -> None:
    p, q = table(seed, 3), table(seed + 60, 3)
    outputs, _ = over_drafts(Kseq(), copies(q, 2, 2), p, 3, STOPS)
    assert outputs == pytest.approx(plain(p, 3, STOPS), abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_coin_keeps_the_law_of_texts_that_end_inside_its_tree(seed: int) -> None:
    tree = TokenTree(0).chain([1, 2]).chain([2, 0]).chain([2, 1, 0])
    rows = table(seed, 3)
    outputs, _ = enumerate_rule(Coin(), tree, rows, STOPS)
    assert outputs == pytest.approx(joint(rows, tree, STOPS), abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [
        (Coin(), 1.0),
        (Synthetic(rate=0.9), 0.0),
        (Synthetic(rate=0.9), 1.0),
        (Typical(0.01, 0.01), 1.0),
    ],
)
def test_the_accepted_path_stops_at_an_end_and_has_no_token_after_it(
    rule: Rule, temperature: float
) -> None:
    tree = TokenTree(0).chain([2, 1, 0, 2])
    ended = 0
    for seed in range(40):
        rows = table(seed % 5, 3)
        outcome = rule(tree, target(rows, tree, STOPS, temperature), Rng(seed), 0)
        assert len(outcome.path) <= 2 and all(node <= 2 for node, _ in outcome.tested)
        assert (outcome.token is None) == (len(outcome.path) == 2)
        ended += outcome.token is None
    assert ended, "no path reached the end: not put to the test"


class WatchedTarget(Target):
    """Notes the nodes whose law was asked for."""

    def p(self, node: int) -> torch.Tensor:
        self.__dict__.setdefault("asked", []).append(node)
        return super().p(node)


def test_block_asks_for_no_law_below_a_token_the_target_excludes() -> None:
    """A grammar may have no answer there either; such a chain ends like a refused one."""
    p, q = table(3, 3, zeros=True), table(43, 3)
    impossible = p(()).tolist().index(0.0)
    tree = TokenTree(0)
    for token in (impossible, 0, 1):
        tree.add(len(tree) - 1, token, law=Law(q(())), value=0.5)
    made = target(p, tree)
    watched = WatchedTarget(made.rows, made.sampler, [], tree)
    assert Block()(tree, watched, Rng(0), 0).path == []
    assert watched.__dict__["asked"] == [0]
