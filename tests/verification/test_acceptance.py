"""What all rules share: the choice by default, greedy targets, refusals, and what they tell of what
they tested.
"""

from __future__ import annotations

import pytest
import torch

from foretell import registry
from foretell.core.distribution import Sampler, Target
from foretell.core.random import Rng
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.testing.outcomes import Enumerator
from foretell.verification.acceptance import verify_by_default, verify_in_order, walk_tree
from foretell.verification.block import Block
from tests.verification.tables import chain, copies, enumerate_rule, table, target

# Those that read hidden states verify nothing without a model: tests/verification/test_judge.py.
RULES = [
    name for name in registry.method_names("rule") if not registry.load_method(name, "rule").taps
]


def fitting(rule: str, seed: int) -> TokenTree:
    """A tree the rule takes: a fixed one, or else a drawn chain."""
    cls = registry.load_method(rule, "rule")
    fixed = TokenTree(0).chain([1, 2]).chain([2, 0]).chain([0], at=1)
    return fixed if cls().can_verify(fixed) else chain(table(seed, 3), 2)(Rng(seed))


def greedy(tree: TokenTree, seed: int) -> Target:
    rows = torch.stack([table(seed, 3)(tuple(tree.tokens_to(n))) for n in range(len(tree))]).log()
    return Target(rows, Sampler(Sampling(), [0], (), 3), [], tree)


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if registry.load_method(rule, "rule").greedy]
)
def test_with_a_greedy_target_every_rule_is_the_walk_on_any_tree(rule: str) -> None:
    for seed in range(10):
        for tree in (
            fitting(rule, seed),
            copies(table(seed + 9, 3), 2, 3)(Rng(seed)),
            TokenTree(0),
        ):
            outcome = registry.load_method(rule, "rule")()(tree, greedy(tree, seed), Rng(0), 0)
            text: list[int] = []
            node = 0
            while node >= 0:
                text.append(int(table(seed, 3)(tuple(text)).argmax()))
                node = tree.find_child(node, text[-1])
            assert [*(tree.tokens[n] for n in outcome.path), outcome.token] == text


@pytest.mark.parametrize("rule", RULES)
def test_an_outcome_is_a_path_of_the_tree_and_says_what_was_tested(rule: str) -> None:
    made = registry.load_method(rule, "rule")()
    for seed in range(40):
        tree = fitting(rule, seed)
        outcome = made(tree, target(table(seed, 3), tree), Rng(seed), 4)
        node = 0
        for child in outcome.path:
            assert tree.parents[child] == node
            node = child
        assert 0 <= outcome.token < 3
        told = dict(outcome.tested)
        assert all(told.get(n) for n in outcome.path), "an accepted node was not told as tested"
        assert all(0 < n < len(tree) for n in told)
        if registry.load_method(rule, "rule").exact:
            assert {n for n, good in told.items() if good} == set(outcome.path)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_draft_the_token_comes_from_the_target(rule: str) -> None:
    rows = table(3, 4)
    outputs, accepted = enumerate_rule(registry.load_method(rule, "rule")(), TokenTree(0), rows)
    assert accepted == 0 and outputs == pytest.approx(
        {(t,): p for t, p in enumerate(rows(()).tolist())}
    )


def test_the_default_walks_fixed_trees_and_is_sequential_for_drawn_ones() -> None:
    fixed, drawn = TokenTree(0).chain([1, 2]), chain(table(1, 3), 2)
    for seed in range(20):
        rows = table(seed, 3)
        for tree, rule in ((fixed, walk_tree), (drawn(Rng(seed)), verify_in_order)):
            a, b = (r(tree, target(rows, tree), Rng(seed), 7) for r in (verify_by_default, rule))
            assert (a.path, a.token, a.tested) == (b.path, b.token, b.tested)


def test_a_tree_with_the_wrong_laws_is_refused_by_name() -> None:
    tree = TokenTree(0).chain([1])
    with pytest.raises(BadConfig, match=r"(?i)rule 'block' cannot verify.*a chain of drawn tokens"):
        Block()(tree, target(table(1, 3), tree), Rng(0), 0)


@pytest.mark.parametrize("rule", RULES)
def test_no_key_of_the_door_is_used_twice(rule: str) -> None:
    """The enumerator refuses a second use; drafting and verifying share one door."""
    made, draft = registry.load_method(rule, "rule")(), table(2, 3)
    drawn = made.can_verify(chain(draft, 1)(Rng(0)))

    def once(door: Enumerator) -> int:
        tree = chain(draft, 2)(door) if drawn else TokenTree(0).chain([1, 2]).chain([0])
        return len(made(tree, target(table(5, 3), tree), door, 0).path)

    assert sum(weight for weight, _ in Enumerator.walk_outcomes(once)) == pytest.approx(1)


def test_tokens_beyond_the_targets_vocabulary_are_refused() -> None:
    """A draft model may have more tokens than the target: the law of such a draft gives the rest to
    the target.
    """
    tree = TokenTree(0)
    tree.add(0, 1, Law(torch.tensor([0.2, 0.5, 0.1, 0.2], dtype=torch.float64)))
    outputs, _ = enumerate_rule(verify_in_order, tree, table(4, 3))
    assert sum(outputs.values()) == pytest.approx(1) and all(
        t < 3 for path in outputs for t in path
    )
