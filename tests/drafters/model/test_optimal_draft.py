"""Greedy plus one drawn: the shape of its trees, acceptance at the optimum of all rules, and slips
that the laws catch; its exactness in general is in test_laws.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.random import Door
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model import optimal_draft
from foretell.drafters.model.optimal_draft import OptimalDraft
from foretell.errors import BadConfig
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from foretell.verification.acceptance import verify_in_order
from tests import laws
from tests.drafters.driving import drive_step
from tests.verification.tables import enumerate_rule, over_drafts, plain

SPECS = ["optimal-draft:length=2,branches=1 2", "optimal-draft:length=1,branches=3"]
PROMPT = [1, 2, 3]
TOY = Toy(5, seed=2, sharpness=6.0)
DRAWN = Sampling(temperature=1.0, max_new_tokens=9)


def drive(
    drafter: OptimalDraft,
    sampling: Sampling,
    budget: int = 64,
    rng: Door | None = None,
    toy: Toy = TOY,
    prompt: Sequence[int] = PROMPT,
) -> tuple[TokenTree, list[Ask], Context]:
    return drive_step(drafter, sampling, toy, prompt, budget, rng)


def widths(tree: TokenTree) -> list[int]:
    return [tree.depths.count(depth) for depth in range(1, max(tree.depths) + 1)]


def law_of(toy: Toy, *path: int) -> torch.Tensor:
    return torch.tensor(laws.row(toy, [*PROMPT, *path]), dtype=torch.float64).softmax(-1)


# --- its trees


@pytest.mark.parametrize("seed", range(5))
def test_the_drawn_child_comes_first_and_then_the_best_tokens(seed: int) -> None:
    sampling = Sampling(temperature=0.7, seed=seed, frequency_penalty=0.3)
    tree, asks, ctx = drive(OptimalDraft(3, (3, 2, 1)), sampling)
    assert widths(tree) == [3, 6, 6] and len(asks) == 3
    rows = TOY.score(PROMPT, tree)
    for node, tries in enumerate(tree.tries):
        if not tries:
            continue
        q = ctx.sampler.law(rows[node], tree.tokens_to(node))
        best = q.argsort(descending=True).tolist()[: len(tries) - 1]
        drawn, *chosen = tries
        assert [tree.tokens[child] for child in chosen] == best
        assert all(tree.laws[child] is None for child in chosen)
        assert tree.tokens[drawn] not in best
        rest = q.clone()
        rest[best] = 0
        law = tree.laws[drawn]
        assert law is not None
        assert law.probs.tolist() == pytest.approx((rest / rest.sum()).tolist(), abs=1e-12)
        for child in tries:
            want = tree.values[node] * float(q[tree.tokens[child]])
            assert tree.values[child] == pytest.approx(want)


def test_at_temperature_zero_children_are_the_best_tokens() -> None:
    tree, _, _ = drive(OptimalDraft(3, (3, 2)), Sampling())
    assert not tree.has_draws and widths(tree) == [3, 6, 12]
    rows = TOY.score(PROMPT, tree)
    for node, tries in enumerate(tree.tries):
        order = rows[node].argsort(descending=True).tolist()
        assert [tree.tokens[child] for child in tries] == order[: len(tries)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_small_budget_leaves_a_node_to_every_level(temperature: float) -> None:
    want = {2: [1], 3: [1, 1], 4: [1, 1, 1], 5: [2, 1, 1], 7: [2, 3, 1], 11: [2, 4, 4]}
    for budget, shape in want.items():
        tree, _, _ = drive(OptimalDraft(), Sampling(temperature=temperature), budget)
        assert widths(tree) == shape, budget


def test_the_likelier_of_two_children_goes_on_where_one_may() -> None:
    tree, _, _ = drive(OptimalDraft(), Sampling(temperature=1.0, seed=1), budget=5)
    chosen = tree.tries[0][1]
    assert tree.laws[chosen] is None and tree.tries[chosen] and not tree.tries[tree.tries[0][0]]


def test_where_nothing_is_left_to_draw_there_are_chosen_children_alone() -> None:
    for top_k, children in ((1, 1), (2, 2), (3, 3), (4, 3)):
        sampling = Sampling(temperature=1.0, top_k=top_k)
        tree, _, _ = drive(OptimalDraft(1, (3,)), sampling)
        assert widths(tree) == [children]
        assert tree.has_draws == (top_k >= 3)


# --- its optimum


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_sequential_verification_reaches_the_optimum_of_all_rules(seed: int, k: int) -> None:
    """The optimum by the dual: 1 + the least P(H) - Q(all drafts are in H) of any set H."""
    toy = Toy(5, seed=9, sharpness=4.0)
    p, q = law_of(Toy(5, seed=seed)), law_of(toy)
    outputs, accepted = over_drafts(
        verify_in_order,
        lambda door: drive(OptimalDraft(1, (k,)), DRAWN, 9, door, toy)[0],
        lambda path: p,
        1,
    )
    assert outputs == pytest.approx(plain(lambda path: p, 1), abs=1e-12)
    top = q.argsort(descending=True)[: k - 1]
    rest = q.index_fill(0, top, 0)
    rest /= rest.sum()
    others = torch.minimum(p, rest).index_fill(0, top, 0)
    assert accepted == pytest.approx(float(p[top].sum() + others.sum()), abs=1e-9)
    least = 0.0
    for chosen in product([0.0, 1.0], repeat=5):
        inside = torch.tensor(chosen, dtype=torch.float64)
        all_inside = float(inside @ rest) if bool(inside[top].all()) else 0.0
        least = min(least, float(inside @ p) - all_inside)
    assert accepted == pytest.approx(1 + least, abs=1e-9)


def test_the_best_token_first_would_accept_less() -> None:
    """Of a tree like that no rule is told, but the law allows it, and the paper leaves it open."""
    toy, p = Toy(5, seed=9, sharpness=4.0), law_of(Toy(5, seed=1))

    def late(door: Door) -> TokenTree:
        tree = drive(OptimalDraft(1, (3,)), DRAWN, 9, door, toy)[0]
        tree.tries[0].append(tree.tries[0].pop(0))
        return tree

    in_order = over_drafts(
        verify_in_order,
        lambda door: drive(OptimalDraft(1, (3,)), DRAWN, 9, door, toy)[0],
        lambda path: p,
        1,
    )
    accepted = 0.0
    for weight, tree in Enumerator.walk_outcomes(late):
        accepted += weight * enumerate_rule(verify_in_order, tree, lambda path: p)[1]
    assert accepted < in_order[1] - 1e-3


def test_two_levels_accept_what_the_closed_form_says() -> None:
    """Level by level: the probability of each child, and below it the same of its own laws."""
    toy, target = Toy(3, seed=9, sharpness=4.0), Toy(3, seed=3)
    prompt = [0, 1, 2]

    def law_of(toy: Toy, *path: int) -> torch.Tensor:
        return torch.tensor(laws.row(toy, [*prompt, *path]), dtype=torch.float64).softmax(-1)

    def share(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Of each token (V,): the probability that it is an accepted child."""
        best = q.argmax()
        rest = q.index_fill(0, best, 0)
        return torch.minimum(p, rest / rest.sum()).index_fill(0, best, float(p[best]))

    want = 0.0
    for token, chance in enumerate(share(law_of(target), law_of(toy)).tolist()):
        below = share(law_of(target, token), law_of(toy, token))
        want += chance * (1 + float(below.sum()))
    _, accepted = over_drafts(
        verify_in_order,
        lambda door: drive(OptimalDraft(2, (2,)), DRAWN, 9, door, toy, prompt)[0],
        lambda path: law_of(target, *path),
        1,
    )
    assert accepted == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("setting", ["top-p", "penalties", "end"])
def test_three_children_have_the_targets_law(setting: str) -> None:
    laws.check_law(Speculative(OptimalDraft(2, (3, 1)), nodes=4), setting, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    law = laws.enumerate_law(laws.build("optimal-draft"), [0, 1, 0], setting, models)
    assert law.distance(laws.reference(models["target"], [0, 1, 0], setting)) < 1e-9
    assert law.accepted


# --- slips


@dataclass(frozen=True)
class Relaid(OptimalDraft):
    """Changes the finished tree."""

    def change(self, tree: TokenTree) -> None:
        raise NotImplementedError

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        self.change(tree)
        return tree


class WholeLaw(Relaid):
    """Declares for the drawn child the law with the best token in it."""

    def change(self, tree: TokenTree) -> None:
        for tries in tree.tries:
            if len(tries) > 1:
                drawn, best = tries
                law = tree.laws[drawn]
                assert law is not None
                q = law.probs.clone()
                q[tree.tokens[best]] = 1.0
                tree.laws[drawn] = Law(q / 2)


class Dropped(Relaid):
    """Takes the drawn child out where it is the lowest id."""

    def change(self, tree: TokenTree) -> None:
        for tries in tree.tries:
            if len(tries) > 1 and tree.tokens[tries[0]] < tree.tokens[tries[1]]:
                tries.pop(0)


@pytest.mark.parametrize("slip", [WholeLaw, Dropped])
def test_wrong_laws_and_late_choices_are_caught(slip: type[Relaid]) -> None:
    laws.check_law(Speculative(OptimalDraft(1, (2,)), nodes=2), "plain", 2)
    with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
        laws.check_law(Speculative(slip(1, (2,)), nodes=2), "plain", 2)


def test_a_best_token_that_is_drawn_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An urn that draws from all of q, with a law that says otherwise."""

    class Full(optimal_draft.Urn):
        def add_draw(self, ctx: Context, tree: TokenTree, node: int, key: int, source: str) -> int:
            token = ctx.rng.sample(self.q, "draft", len(ctx.output), key)
            return tree.add(node, token, law=Law(self.rest / self.left), source=source)

    monkeypatch.setattr(optimal_draft, "Urn", Full)
    with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
        laws.check_law(Speculative(OptimalDraft(1, (2,)), nodes=2), "plain", 2)


@pytest.mark.parametrize(("field", "value"), [("branches", ()), ("branches", (2, 0))])
def test_a_bad_value_is_told_with_field_value_and_range(field: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=f"optimal-draft:{field}=.*between 1 and 64"):
        OptimalDraft(**{field: value})
