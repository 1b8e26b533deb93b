"""Acceptance from two laws alone is what the rules themselves accept, over every draft and every
coin; and no rule beats the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from foretell.core.random import Door, Rng
from foretell.core.tree import Law, TokenTree
from foretell.lab import acceptance
from foretell.lab.acceptance import Chance
from foretell.lab.runner import BOUND, PAIRS, Place
from foretell.verification.acceptance import verify_in_order, walk_tree
from foretell.verification.coin import Coin
from foretell.verification.kseq import Kseq
from tests.lab import pairs
from tests.verification.tables import enumerate_rule

RULES = {"kseq": Kseq(), "sequential": verify_in_order, "walk": walk_tree, "coin": Coin()}
LAWS = [(0, 3, 1.0, 0), (1, 3, 3.0, 0), (2, 4, 2.0, 1), (3, 3, 2.0, 1)]


def place(p: torch.Tensor, q: torch.Tensor, most: int, draws: int = 2) -> Place:
    return Place(p, q, most, Rng(0), 0, draws)


def tree_of(drafts: str, q: torch.Tensor, tokens: tuple[int, ...]) -> TokenTree:
    """The drafted tokens, with the laws they were drawn from."""
    tree = TokenTree(0)
    rest = q.clone()
    if drafts == "one drawn":
        first, *best = tokens
        rest[best] = 0
        tree.add(0, first, law=Law(rest / rest.sum()))
        return chosen(tree, best)
    whole = Law(q)
    for token in tokens:
        law = whole if drafts == "independent" else Law(rest / rest.sum())
        tree.add(0, token, law=law)
        rest[token] = 0
    return tree


def chosen(tree: TokenTree, tokens: Sequence[int]) -> TokenTree:
    for token in tokens:
        tree.add(0, token)
    return tree


DRAFTS: dict[str, Callable[[torch.Tensor, int], pairs.Drafts]] = {
    "independent": pairs.independent,
    "unreplaced": pairs.unreplaced,
    "one drawn": pairs.one_drawn,
}


@pytest.mark.parametrize("case", LAWS)
@pytest.mark.parametrize(("drafts", "rule"), [pair for pair in PAIRS if pair[1] != BOUND])
def test_a_pair_accepts_what_its_rule_does_over_all_drafts_and_coins(
    drafts: str, rule: str, case: tuple[int, int, float, int]
) -> None:
    seed, vocab, sharpness, zeros = case
    p, q = pairs.law(seed, vocab, sharpness), pairs.law(seed + 50, vocab, sharpness, zeros)
    found = PAIRS[drafts, rule](place(p, q, 3))
    for k, chance in enumerate(found, 1):
        if drafts == "unreplaced" and rule == "walk" and k > 2:
            continue  # drawn: see below
        assert chance.variance is None
        want = 0.0
        if drafts == "best":
            best = q.argsort(descending=True, stable=True)[:k].tolist()
            tree = chosen(TokenTree(0), [token for token in best if q[token] > 0])
            want = enumerate_rule(RULES[rule], tree, lambda path: p)[1]
        else:
            for tokens, weight in DRAFTS[drafts](q, k):
                if weight:
                    tree = tree_of(drafts, q, tokens)
                    want += weight * enumerate_rule(RULES[rule], tree, lambda path: p)[1]
        assert chance.value == pytest.approx(want, abs=1e-9), k


def measured(p: torch.Tensor, q: torch.Tensor, most: int) -> dict[tuple[str, str], list[Chance]]:
    return {pair: measure(place(p, q, most, 64)) for pair, measure in PAIRS.items()}


@pytest.mark.parametrize("seed", range(12))
def test_no_rule_accepts_more_than_the_optimum(seed: int) -> None:
    sharpness = (0.5, 2.0, 4.0)[seed % 3]
    p, q = pairs.law(seed, 40, sharpness), pairs.law(seed, 40, sharpness)
    q = (q.log() + pairs.law(seed + 99, 40, 1.0).log()).softmax(-1)  # related, as models are
    found = measured(p, q, 4)
    for (drafts, rule), chances in found.items():
        before = 0.0
        for k, chance in enumerate(chances):
            # Draws may lie above by chance.
            slack = 1e-9 + 6 * math.sqrt(chance.variance or 0)
            assert chance.value <= found[drafts, BOUND][k].value + slack, (drafts, rule, k + 1)
            assert chance.value >= before - slack, "one more draft must not hurt"
            before = chance.value
    for k in range(4):
        bound = found["one drawn", BOUND][k].value
        assert found["one drawn", "sequential"][k].value == pytest.approx(bound, abs=1e-9)
        with_, without = found["independent", BOUND][k], found["unreplaced", BOUND][k]
        assert without.value >= with_.value - 1e-9
        with_, without = found["independent", "sequential"][k], found["unreplaced", "sequential"][k]
        assert without.value >= with_.value - 1e-9 - 6 * math.sqrt(without.variance or 0)
        least = 1 - (1 - 1 / (k + 1)) ** (k + 1)
        kseq = found["independent", "kseq"][k].value
        assert kseq >= least * found["independent", BOUND][k].value - 1e-9
    first = {round(chances[0].value, 9) for (_, rule), chances in found.items() if rule == "kseq"}
    assert first == {round(found["independent", "sequential"][0].value, 9)}


def test_equal_laws_are_always_accepted() -> None:
    p = pairs.law(5, 30)
    for drafts in ("independent", "unreplaced", "one drawn"):
        for rule in ("kseq", "sequential"):
            if (drafts, rule) in PAIRS:
                values = [chance.value for chance in PAIRS[drafts, rule](place(p, p, 3))]
                assert values == pytest.approx([1, 1, 1], abs=1e-9)


# --- what is drawn


@pytest.mark.parametrize("seed", range(3))
def test_drawn_refusals_have_the_mean_of_all_of_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q = pairs.law(seed, 7), pairs.law(seed + 50, 7)
    exact = acceptance.try_unreplaced(p, q, 4, Rng(0), 0, 2)
    assert all(chance.variance is None for chance in exact)
    monkeypatch.setattr(acceptance, "PATHS", 1)
    drawn = acceptance.try_unreplaced(p, q, 4, Rng(seed), 3, 400)
    for k, (one, other) in enumerate(zip(exact, drawn, strict=True), 1):
        assert (other.variance is None) == (k <= 2)
        error = math.sqrt(other.variance or 0)
        assert abs(one.value - other.value) <= 5 * error + 1e-12
        assert error < 0.02


@pytest.mark.parametrize(("seed", "zeros"), [(0, 0), (1, 1), (2, 3), (3, 5)])
def test_drawn_sets_have_the_mean_of_all_of_them(seed: int, zeros: int) -> None:
    p, q = pairs.law(seed, 6), pairs.law(seed + 50, 6, zeros=zeros)
    drawn = acceptance.walk_unreplaced(p, q, 4, Rng(seed), 3, 800)
    for k, chance in enumerate(drawn, 1):
        want = sum(
            weight * float(p[list(tokens)].sum()) for tokens, weight in pairs.unreplaced(q, k)
        )
        assert (chance.variance is None) == (k <= 2)
        error = math.sqrt(chance.variance or 0)
        assert abs(chance.value - want) <= 5 * error + 1e-9


def test_a_few_refusals_at_first_do_not_mean_few_later() -> None:
    """Going through all of a large vocabulary would take for ever."""
    p = pairs.law(1, 5000)
    q = p.clone()
    q[:2] += torch.tensor([0.3, 0.2])
    q /= q.sum()
    assert int((q > p).sum()) == 2
    third, fourth = acceptance.try_unreplaced(p, q, 4, Rng(0), 0, 2)[2:]
    assert third.variance is None and fourth.variance is not None


def test_draws_are_told_apart_by_their_keys() -> None:
    """No key twice, and the same door gives the same numbers again."""

    used = set()

    class Noting(Rng):
        def _hash_bits(self, purpose: str, position: int, index: int) -> int:
            assert (purpose, position, index) not in used
            used.add((purpose, position, index))
            return super()._hash_bits(purpose, position, index)

    p, q = pairs.law(1, 300), pairs.law(51, 300)
    door: Door = Noting(3)
    for number in range(2):
        found = acceptance.try_unreplaced(p, q, 5, door, number, 6)
        again = acceptance.try_unreplaced(p, q, 5, Rng(3), number, 6)
        assert found == again and found[4].variance is not None
        acceptance.walk_unreplaced(p, q, 5, door, number, 6)
