"""The augmented target on tables: the moved law, the law of a step, and no NaN."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.core.random import Rng
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.spec import resolve_method
from foretell.verification.acceptance import verify_in_order
from foretell.verification.augmented import Augmented
from tests import laws
from tests.verification.tables import chain, enumerate_rule, over_drafts, plain, table, target


def moved(p: list[float], q: list[float], eta: float, alpha: float) -> list[float]:
    """By plain loops."""
    weights = []
    for a, b in zip(p, q, strict=True):
        shift = eta * (a - b) if b >= alpha * max(q) else 0.0
        weights.append(a * math.exp(-shift))
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("eta", [0.5, 10.0, 40.0])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_the_moved_law_is_one_step_of_distillation(eta: float, alpha: float) -> None:
    rule = Augmented(eta, alpha)
    for seed in range(4):
        p = table(seed, 6, zeros=True)(())
        q = table(seed + 9, 6, zeros=True)(())
        got = rule.moved_distribution(p, q)
        assert got.tolist() == pytest.approx(moved(p.tolist(), q.tolist(), eta, alpha), abs=1e-12)
        assert rule.moved_distribution(p, p).tolist() == pytest.approx(p.tolist(), abs=1e-12)
        unlikely = q < alpha * q.max()
        before, after = p[unlikely].log(), got[unlikely].log()
        shifts = (after - before)[before > -torch.inf]
        assert len(shifts) == 0 or float(shifts.max() - shifts.min()) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_the_law_of_a_step_is_the_papers(seed: int) -> None:
    rows, drafter, rule = table(seed, 4), table(seed + 50, 4), Augmented(8.0)
    outputs, _ = over_drafts(rule, chain(drafter, 1), rows, 2)
    p, q = rows(()).tolist(), drafter(()).tolist()
    ph = moved(p, q, 8.0, 0.1)
    passed = [b * min(1.0, h / b) for h, b in zip(ph, q, strict=True)]
    rest = [max(a - b, a - h, 0.0) for a, b, h in zip(p, q, ph, strict=True)]
    refused = 1 - sum(passed)
    for first in range(4):
        got = sum(weight for text, weight in outputs.items() if text[0] == first)
        assert got == pytest.approx(passed[first] + refused * rest[first] / sum(rest), abs=1e-12)
        for second in range(4):
            ratio = rows((first,))[second]
            assert outputs[first, second] == pytest.approx(got * float(ratio), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_with_eta_zero_it_is_exact_and_gives_the_tokens_of_the_residual_rule(seed: int) -> None:
    rows, drafter = table(seed, 3), table(seed + 40, 3, zeros=True)
    outputs, _ = over_drafts(Augmented(0.0), chain(drafter, 2), rows, 3)
    assert outputs == pytest.approx(plain(rows, 3), abs=1e-12)
    for draw in range(20):
        tree = TokenTree(0)
        for node in range(3):
            law = drafter(tuple(tree.tokens_to(node)))
            tree.add(node, Rng(draw).sample(law, "draft", 0, node), Law(law))
        results = [
            rule(tree, target(rows, tree), Rng(seed), 5)
            for rule in (Augmented(0.0), verify_in_order)
        ]
        assert results[0] == results[1]


def test_without_a_shift_the_whole_engine_gives_the_same_tokens() -> None:
    for spec in ("draft:length=3", "rapid:length=3"):
        models = laws.world(laws.build(spec), 8, copy=2.0)
        for seed in range(3):
            setting = laws.Setting(Sampling(temperature=0.9, seed=seed, max_new_tokens=20))
            texts = [
                laws.generate(laws.build(spec, rule), [1, 2, 1], setting, models)
                for rule in ("augmented,eta=0", "sequential")
            ]
            assert texts[0].ctx.output == texts[1].ctx.output


class Refusing(Rng):
    """Refuses whatever has not probability 1 or more by a margin, as rounding may."""

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        return False


@pytest.mark.parametrize("eta", [0.0, 10.0])
def test_a_residual_without_mass_is_no_nan(eta: float) -> None:
    """The released code divides by zero where neither difference is above 0 (complaint 17)."""
    rows = table(3, 5)
    tree = TokenTree(0)
    for node in range(2):
        law = rows(tuple(tree.tokens_to(node)))
        tree.add(node, int(law.argmax()), Law(law))
    outcome = Augmented(eta)(tree, target(rows, tree), Refusing(0), 0)
    assert outcome.path == [1, 2] and outcome.token is not None


def test_a_law_with_impossible_tokens_is_no_nan() -> None:
    rows, drafter = table(1, 4, zeros=True), table(2, 4, zeros=True)
    outputs, _ = over_drafts(Augmented(20.0), chain(drafter, 2), rows, 3)
    assert sum(outputs.values()) == pytest.approx(1.0, abs=1e-12)
    possible = plain(rows, 3)
    assert all(possible[text] > 0 for text, weight in outputs.items() if weight)


def test_the_larger_the_shift_the_more_is_accepted() -> None:
    rows, drafter = table(5, 4), table(8, 4)
    accepted = []
    for eta in (0.0, 2.0, 10.0):
        accepted.append(over_drafts(Augmented(eta), chain(drafter, 2), rows, 3)[1])
    assert accepted == sorted(accepted) and accepted[0] < accepted[-1]


def test_what_it_takes_and_bad_values() -> None:
    assert not Augmented().exact and Augmented().can_verify(TokenTree(0))
    assert not Augmented().can_verify(TokenTree(0).chain([1, 2]))
    tree = TokenTree(0)
    law = Law(table(0, 3)(()))
    tree.add(0, 1, law)
    assert Augmented().can_verify(tree)
    tree.add(0, 2, law)
    assert not Augmented().can_verify(tree)
    for name, value in (("eta", -1.0), ("alpha", 1.5)):
        with pytest.raises(BadConfig, match=f"{name}={value}: must be between 0"):
            Augmented(**{name: value})
    strategy = resolve_method("rapid:length=4,rule=augmented,eta=20")[1]
    assert strategy.rule == Augmented(20.0)  # type: ignore[attr-defined]
    one_step = enumerate_rule(Augmented(), TokenTree(0), table(0, 3))[0]
    assert one_step == pytest.approx(plain(table(0, 3), 1))
