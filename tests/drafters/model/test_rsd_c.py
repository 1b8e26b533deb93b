"""RSD-C: the shape of its trees, the laws they are drawn from, and slips that the laws catch; its
exactness in general is in test_laws.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.random import Door
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model import rsd_c
from foretell.drafters.model.rsd_c import RsdC
from foretell.errors import BadConfig
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests import laws
from tests.drafters.driving import drive_step

SPECS = ["rsd-c:length=2,branches=1 2", "rsd-c:length=1,branches=3"]
PROMPT = [1, 2, 3]
TOY = Toy(5, seed=2, sharpness=6.0)


def drive(
    drafter: RsdC, sampling: Sampling, budget: int = 64, rng: Door | None = None, toy: Toy = TOY
) -> tuple[TokenTree, list[Ask], Context]:
    return drive_step(drafter, sampling, toy, PROMPT, budget, rng)


def widths(tree: TokenTree) -> list[int]:
    return [tree.depths.count(depth) for depth in range(1, max(tree.depths) + 1)]


def test_every_level_has_its_branches_and_one_forward() -> None:
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=5)
        tree, asks, _ = drive(RsdC(4, (3, 2, 1)), sampling)
        assert widths(tree) == [3, 6, 6, 6] and len(asks) == 4
        assert [len(tries) for tries in tree.tries[:4]] == [3, 2, 2, 2]


def test_children_are_drawn_from_what_their_elder_siblings_left() -> None:
    """Every outcome of a draft is as likely as the product of the laws that its nodes declare, and
    these are the draft model's without the elder siblings.
    """
    toy, total = Toy(3, 4, sharpness=3.0), 0.0
    sampling = Sampling(temperature=0.7, max_new_tokens=9, frequency_penalty=0.3)

    def once(door: Enumerator) -> TokenTree:
        tree, _, ctx = drive(RsdC(2, (2,)), sampling, 8, door, toy)
        rows = toy.score(PROMPT, tree)
        for node, tries in enumerate(tree.tries):
            rest = ctx.sampler.law(rows[node], tree.tokens_to(node)).tolist()
            for child in tries:
                law = tree.laws[child]
                assert law is not None
                want = [q / sum(rest) for q in rest]
                assert law.probs.tolist() == pytest.approx(want, abs=1e-12)
                rest[tree.tokens[child]] = 0.0
        return tree

    for weight, tree in Enumerator.walk_outcomes(once):
        product = 1.0
        for node in range(1, len(tree)):
            product *= tree.laws[node].token_prob(tree.tokens[node])  # type: ignore[union-attr]
        assert weight == pytest.approx(product, abs=1e-12)
        total += weight
    assert total == pytest.approx(1)


def test_at_temperature_zero_children_are_the_best_tokens() -> None:
    tree, _, _ = drive(RsdC(3, (3, 2)), Sampling())
    assert not tree.has_draws
    rows = TOY.score(PROMPT, tree)
    for node, tries in enumerate(tree.tries):
        order = rows[node].argsort(descending=True).tolist()
        assert [tree.tokens[child] for child in tries] == order[: len(tries)]
        for child in tries:
            chance = float(rows[node].softmax(-1)[tree.tokens[child]])
            assert tree.values[child] == pytest.approx(tree.values[node] * chance)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_small_budget_leaves_a_node_to_every_level(temperature: float) -> None:
    want = {2: [1], 3: [1, 1], 4: [1, 1, 1], 5: [2, 1, 1], 7: [2, 3, 1], 11: [2, 4, 4]}
    for budget, shape in want.items():
        tree, _, _ = drive(RsdC(), Sampling(temperature=temperature), budget)
        assert widths(tree) == shape, budget
    sampling = Sampling(temperature=temperature, max_new_tokens=3)
    assert widths(drive(RsdC(), sampling)[0]) == [2, 4]


def test_tokens_that_are_not_possible_are_no_children() -> None:
    for temperature in (0.0, 1.0):
        banned = Sampling(temperature=temperature, bad_words=[[0], [1], [4]])
        tree, _, _ = drive(RsdC(2, (4,)), banned)
        assert widths(tree) == [2, 4] and set(tree.tokens[1:]) == {2, 3}
    assert widths(drive(RsdC(2, (4,)), Sampling(temperature=1.0, top_k=1))[0]) == [1, 1]


@pytest.mark.parametrize("setting", ["top-p", "penalties", "end"])
def test_three_children_have_the_targets_law(setting: str) -> None:
    strategy = Speculative(RsdC(2, (3, 1)), nodes=4)
    laws.check_law(strategy, setting, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    law = laws.enumerate_law(laws.build("rsd-c"), [0, 1, 0], setting, models)
    assert law.distance(laws.reference(models["target"], [0, 1, 0], setting)) < 1e-9
    assert law.accepted


# --- slips


class Relaid(RsdC):
    """Changes the finished tree."""

    def change(self, tree: TokenTree) -> None:
        raise NotImplementedError

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        self.change(tree)
        return tree


class WithReplacement(Relaid):
    """Declares the first child's law for all children of a node."""

    def change(self, tree: TokenTree) -> None:
        for tries in tree.tries:
            for child in tries:
                tree.laws[child] = tree.laws[tries[0]]


class Sorted(Relaid):
    """Tries children by token, with the laws that they would have if drawn in that order."""

    def change(self, tree: TokenTree) -> None:
        for tries in tree.tries:
            if not tries:
                continue
            law = tree.laws[tries[0]]
            assert law is not None
            rest = law.probs.clone()
            tries.sort(key=lambda child: tree.tokens[child])
            for child in tries:
                tree.laws[child] = Law(rest / rest.sum())
                rest = rest.index_fill(0, torch.tensor(tree.tokens[child]), 0)


class Pruned(Relaid):
    """Takes out the less likely child after both were drawn."""

    def change(self, tree: TokenTree) -> None:
        if len(tree) == 3:
            tree.tries[0].remove(min(tree.tries[0], key=lambda child: tree.values[child]))


@pytest.mark.parametrize("slip", [WithReplacement, Sorted, Pruned])
def test_wrong_laws_and_orders_are_caught(slip: type[Relaid]) -> None:
    laws.check_law(Speculative(RsdC(1, (2,)), nodes=2), "plain", 2)
    with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
        laws.check_law(Speculative(slip(1, (2,)), nodes=2), "plain", 2)


def test_a_token_drawn_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An urn that keeps what was drawn, with laws that say otherwise."""

    class Full(rsd_c.Urn):
        def add_draw(self, ctx: Context, tree: TokenTree, node: int, key: int, source: str) -> int:
            token = ctx.rng.sample(self.q, "draft", len(ctx.output), key)
            law = Law(self.rest / self.left)
            self.rest[token] = 0
            self.left = float(self.rest.sum())
            return tree.add(node, token, law=law, source=source)

    monkeypatch.setattr(rsd_c, "Urn", Full)
    with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
        laws.check_law(Speculative(RsdC(1, (2,)), nodes=2), "plain", 2)


@pytest.mark.parametrize(("field", "value"), [("branches", ()), ("branches", (2, 0))])
def test_a_bad_value_is_told_with_field_value_and_range(field: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=f"rsd-c:{field}=.*between 1 and 64"):
        RsdC(**{field: value})
