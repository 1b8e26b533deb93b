"""SpecTr: independent chains with their multiplicities, the rule that the method names, and slips
that the laws catch; its exactness in general is in test_laws.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.draft import Draft
from foretell.drafters.model.spectr import Spectr
from foretell.errors import UnknownMethod
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from foretell.verification import kseq
from foretell.verification.kseq import Kseq, acceptance_mass, find_threshold
from foretell.verification.sequential import Sequential
from tests import laws
from tests.drafters.driving import drive_step
from tests.verification.tables import over_drafts, plain

SPECS = ["spectr:drafts=2,length=1"]
PROMPT = [1, 2, 3]
TOY = Toy(5, seed=2, sharpness=6.0)


def drive(
    drafter: Spectr,
    sampling: Sampling,
    budget: int = 65,
    rng: Door | None = None,
    toy: Toy = TOY,
    prompt: Sequence[int] = PROMPT,
) -> tuple[TokenTree, list[Ask], Context]:
    return drive_step(drafter, sampling, toy, prompt, budget, rng)


# --- its rule


def test_k_sequential_selection_verifies_it_unless_the_user_names_another_rule() -> None:
    for spec in ("spectr", "spectr:rule=default", Spectr(), Speculative(Spectr())):
        assert resolve_method(spec) == ("spectr", Speculative(Spectr(), Kseq()))
    assert resolve_method("spectr:rule=sequential,nodes=9")[1] == Speculative(
        Spectr(), Sequential(), 9
    )
    chosen = Speculative(Spectr(), Sequential())
    assert resolve_method(chosen)[1] == chosen
    assert resolve_method("draft")[1].rule is None  # type: ignore[attr-defined]
    joined = resolve_method("spectr+ngram")[1]
    assert joined.rule is None  # type: ignore[attr-defined]


def test_made_bare_it_has_its_rule_and_one_that_is_named_stays() -> None:
    assert Speculative(Spectr()).rule == Kseq()
    assert Speculative(Spectr(), nodes=9) == resolve_method("spectr:nodes=9")[1]
    assert Speculative(Spectr(), Sequential()).rule == Sequential()
    assert Speculative(Draft()).rule is None


def test_a_rule_there_is_not_is_told_when_the_method_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Spectr, "rule", "kseg")
    with pytest.raises(UnknownMethod, match="unknown rule 'kseg'; did you mean kseq"):
        Speculative(Spectr())


# --- its trees


@pytest.mark.parametrize("seed", range(5))
def test_every_chain_is_there_with_one_forward_a_level(seed: int) -> None:
    tree, asks, _ = drive(Spectr(3, 8), Sampling(temperature=1.0, seed=seed))
    assert len(asks) == 3 and len(tree.tries[0]) == 8 and len(set(tree.tries[0])) <= 5
    assert Kseq().can_verify(tree)
    for node in range(1, len(tree)):
        times = tree.tries[tree.parents[node]].count(node)
        assert times == len(tree.tries[node]) or tree.depths[node] == 3


def test_a_budget_makes_fewer_chains_and_then_a_shorter_one() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    for budget, chains in ((65, 8), (17, 2), (16, 1), (9, 1), (5, 1), (2, 1)):
        tree, _, _ = drive(Spectr(), sampling, budget)
        assert len(tree.tries[0]) == chains and max(tree.depths) == min(8, budget - 1)
        assert len(tree) <= budget
    assert len(drive(Spectr(), sampling, 1)[0]) == 1


def test_at_temperature_zero_it_is_one_chain_of_best_tokens() -> None:
    tree, asks, _ = drive(Spectr(4, 8), Sampling())
    assert tree.is_chain and not tree.has_draws and len(asks) == 4
    rows = TOY.score(PROMPT, tree)
    assert tree.tokens[1:] == rows.argmax(-1).tolist()[:4]


# --- what it accepts


@pytest.mark.parametrize(("seed", "k"), [(0, 1), (0, 2), (1, 2), (2, 2), (1, 3)])
def test_it_is_accepted_as_often_as_the_paper_says(seed: int, k: int) -> None:
    """1 - (1 - b)^k at the r that is valid, and at least 1 - (1 - 1/k)^k of any way's most."""
    toy = Toy(3, seed=9, sharpness=4.0)
    sampling = Sampling(temperature=1.0, max_new_tokens=9)
    prompt = [0, 1, 2]
    q = torch.tensor(laws.row(toy, prompt), dtype=torch.float64).softmax(-1)
    p = torch.tensor(laws.row(Toy(3, seed=seed), prompt), dtype=torch.float64).softmax(-1)

    def draw(door: Door) -> TokenTree:
        return drive(Spectr(1, k), sampling, 9, door, toy, prompt)[0]

    outputs, accepted = over_drafts(Kseq(), draw, lambda path: p, 1)
    b = acceptance_mass(p, q, find_threshold(p, q, k))
    assert accepted == pytest.approx(1 - (1 - b) ** k, abs=1e-9)
    assert outputs == pytest.approx(plain(lambda path: p, 1), abs=1e-9)
    subsets = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).double()
    most = 1 + float((subsets @ p - (subsets @ q) ** k).min())
    assert (1 - (1 - 1 / k) ** k) * most - 1e-9 <= accepted <= most + 1e-9


def test_two_chains_of_two_tokens_have_the_targets_law() -> None:
    toy, target = Toy(2, seed=5, sharpness=4.0), Toy(2, seed=1)

    def rows(path: tuple[int, ...]) -> torch.Tensor:
        logits = laws.row(target, [0, 1, *path])
        return torch.tensor(logits, dtype=torch.float64).softmax(-1)

    def draw(door: Door) -> TokenTree:
        sampling = Sampling(temperature=1.0, max_new_tokens=9)
        return drive(Spectr(2, 2), sampling, 9, door, toy, [0, 1])[0]

    outputs, accepted = over_drafts(Kseq(), draw, rows, 3)
    assert outputs == pytest.approx(plain(rows, 3), abs=1e-9)
    assert accepted > 1


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    law = laws.enumerate_law(laws.build("spectr:drafts=2,length=2"), [0, 1, 0], setting, models)
    assert law.distance(laws.reference(models["target"], [0, 1, 0], setting)) < 1e-9
    assert law.accepted


# --- slips


@dataclass(frozen=True)
class Once(Spectr):
    """A token that was drawn twice is tried once, as if it had been drawn once."""

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        tree.tries = [list(dict.fromkeys(tries)) for tries in tree.tries]
        return tree


@dataclass(frozen=True)
class Sorted(Spectr):
    """Tries the likelier token first."""

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        for tries in tree.tries:
            tries.sort(key=lambda child: -tree.values[child])
        return tree


@pytest.mark.parametrize("slip", [Once, Sorted])
def test_lost_copies_and_another_order_are_caught(slip: type[Spectr]) -> None:
    laws.check_law(Speculative(Spectr(1, 2), Kseq(), nodes=2), "plain", 2)
    with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
        laws.check_law(Speculative(slip(1, 2), Kseq(), nodes=2), "plain", 2)


def test_a_threshold_that_is_too_low_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kseq, "find_threshold", lambda p, q, k: 1.0)
    with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
        laws.check_law(Speculative(Spectr(1, 2), Kseq(), nodes=2), "plain", 2)
