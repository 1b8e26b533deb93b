"""The optimum by one scan is that of the dual over all sets, and of the transport itself."""

from __future__ import annotations

import pytest
import torch

from foretell.lab import optimum
from tests.lab import pairs

WAYS = {
    "independent": (optimum.independent_optimum, pairs.independent),
    "unreplaced": (optimum.unreplaced_optimum, pairs.unreplaced),
    "one drawn": (optimum.one_drawn_optimum, pairs.one_drawn),
}
# Seed, tokens, sharpness and impossible tokens of each law.
LAWS = [(0, 5, 1.0, 0), (1, 5, 3.0, 0), (2, 6, 2.0, 2), (3, 4, 5.0, 1), (4, 3, 2.0, 1)]


@pytest.mark.parametrize("case", LAWS)
@pytest.mark.parametrize("way", WAYS)
def test_the_scan_finds_what_all_sets_have_and_the_transport_carries(
    way: str, case: tuple[int, int, float, int]
) -> None:
    seed, vocab, sharpness, zeros = case
    bounds, drafts = WAYS[way]
    p, q = pairs.law(seed, vocab, sharpness), pairs.law(seed + 50, vocab, sharpness, zeros)
    for k, found in enumerate(bounds(p, q, 4), 1):
        assert found == pytest.approx(pairs.optimum(p, drafts(q, k)), abs=1e-9), k
        if k < 4:
            assert found == pytest.approx(pairs.transported(p, drafts(q, k)), abs=1e-9), k


@pytest.mark.parametrize("sharpness", [0.5, 3.0, 8.0, 14.0, 40.0])
def test_draws_without_replacement_are_inside_as_often_as_their_sequences_say(
    sharpness: float,
) -> None:
    """Also where two tokens have nearly all of the law."""
    q = pairs.law(7, 5, sharpness)
    for k, inside in enumerate(optimum.inside_probabilities(q, 4), 1):
        for count in range(1, len(q) + 1):
            want = sum(chance for tokens, chance in pairs.unreplaced(q, k) if max(tokens) < count)
            assert float(inside[count - 1]) == pytest.approx(want, abs=1e-10), (k, count)


def test_equal_laws_are_always_accepted_and_foreign_ones_never() -> None:
    p = pairs.law(3, 9)
    for bounds, _ in WAYS.values():
        assert bounds(p, p, 3) == pytest.approx([1, 1, 1], abs=1e-9)
    left = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    right = torch.tensor([0.0, 0.0, 0.4, 0.4, 0.2], dtype=torch.float64)
    for bounds, _ in WAYS.values():
        assert bounds(left, right, 3) == pytest.approx([0, 0, 0], abs=1e-9)
