"""Acceptance by rank and gap on tables: which tokens pass, where it is the walk, and that its law
is not the target's.
"""

from __future__ import annotations

import math

import pytest
import torch

from foretell.core.distribution import Sampler, Target
from foretell.core.random import Rng
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.verification.acceptance import walk_tree
from foretell.verification.relaxed import Relaxed
from tests.verification.tables import differs, enumerate_rule, joint, table, target

TREE = TokenTree(0).chain([1, 2]).chain([2, 0, 1]).chain([0], at=1)


def by_hand(tree: TokenTree, rows: list[list[float]], beta: int, tau: float) -> list[int]:
    """The accepted path of greedy decoding, by loops over sorted scores."""
    path, node = [], 0
    while True:
        row = rows[node]
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        passing = [t for t in order[:beta] if row[order[0]] - row[t] <= tau or t == order[0]]
        children = {tree.tokens[child]: child for child in tree.tries[node]}
        likeliest = next((children[t] for t in passing if t in children), None)
        if likeliest is None:
            return path
        path.append(likeliest)
        node = likeliest


@pytest.mark.parametrize(("beta", "tau"), [(1, 0.0), (2, 0.5), (2, 9.0), (3, 1.0), (5, 3.0)])
def test_rank_and_gap_decide(beta: int, tau: float) -> None:
    lengths = set()
    for seed in range(30):
        rows = table(seed, 4)
        made = target(rows, TREE, temperature=0.0)
        outcome = Relaxed(beta, tau)(TREE, made, Rng(seed), 0)
        assert outcome.path == by_hand(TREE, made.rows.tolist(), beta, tau)
        last = outcome.path[-1] if outcome.path else 0
        assert outcome.token == int(made.rows[last].argmax())
        children = [child for node in (0, *outcome.path) for child in TREE.tries[node]]
        assert outcome.tested == [(child, child in outcome.path) for child in children]
        lengths.add(len(outcome.path))
    assert len(lengths) > 1


def test_with_rank_one_and_no_gap_it_is_the_greedy_walk() -> None:
    for seed in range(40):
        rows = table(seed, 3)
        for rule in (Relaxed(1, 0.0), Relaxed(1, 3.0), Relaxed(5, 0.0)):
            made = target(rows, TREE, temperature=0.0)
            got, want = rule(TREE, made, Rng(seed), 0), walk_tree(TREE, made, Rng(seed), 0)
            assert (got.path, got.token) == (want.path, want.token)


def test_of_equals_the_lowest_id_comes_first() -> None:
    logits = torch.zeros(2, 4, dtype=torch.float64)
    for token, beta, passes in ((0, 1, True), (1, 1, False), (1, 2, True), (3, 3, False)):
        tree = TokenTree(0).chain([token])
        made = Target(logits, Sampler(Sampling(), [0], (), 4), [], tree)
        assert bool(Relaxed(beta, 0.0)(tree, made, Rng(0), 0).path) == passes


def test_what_an_option_excludes_never_passes() -> None:
    logits = torch.tensor([[3.0, 2.9, 2.8, 0.0]] * 2, dtype=torch.float64)
    tree = TokenTree(0).chain([2])
    for sampling in (
        Sampling(bad_words=[[2]]),
        Sampling(logit_bias={2: -math.inf}),
        Sampling(temperature=1.0, top_k=2),
        Sampling(temperature=1.0, logit_bias={2: -9.0}),
    ):
        made = Target(logits, Sampler(sampling, [0], (), 4), [], tree)
        assert not Relaxed()(tree, made, Rng(0), 0).path
    for temperature in (0.0, 1.0):
        made = Target(logits, Sampler(Sampling(temperature=temperature), [0], (), 4), [], tree)
        assert Relaxed()(tree, made, Rng(0), 0).path == [1]


def test_nothing_is_asked_behind_an_end() -> None:
    tree = TokenTree(0).chain([2, 1, 0, 2])
    ended = 0
    for seed in range(40):
        for temperature in (0.0, 1.0):
            made = target(table(seed % 5, 3), tree, (1,), temperature)
            outcome = Relaxed(3, 9.0)(tree, made, Rng(seed), 0)
            assert len(outcome.path) <= 2
            assert (outcome.token is None) == (len(outcome.path) == 2)
            ended += outcome.token is None
    assert ended


def test_the_law_is_not_the_targets() -> None:
    tree, rows = TokenTree(0).chain([1, 2]), table(3, 3)
    assert differs(enumerate_rule(Relaxed(), tree, rows)[0], joint(rows, tree)) > 0.05
    assert not Relaxed().exact and not Relaxed().greedy
