"""Its order: see foretell/diffusion/entropy.py."""

from __future__ import annotations

import pytest

from foretell.testing.toy_canvas import Oracle, all_orders, all_replacements
from tests.diffusion.worlds import check_bad, check_joint_law, law


def test_one_token_a_step_draws_from_the_joint_law() -> None:
    check_joint_law("entropy")


def test_bad_settings_are_named() -> None:
    check_bad("entropy:steps=-1", "entropy:block=-2")


@pytest.mark.parametrize(
    ("texts", "steps", "chance"),
    [
        (all_orders([0, 1, 2, 3]), 1, 0.09375),
        (all_orders([0, 1, 2, 3]), 2, 0.375),
        (all_replacements([0, 1, 2, 3], 4), 1, 0.4219),
    ],
    ids=["shuffle at once", "shuffle in two", "replace at once"],
)
def test_tokens_that_are_drawn_together_miss_by_what_theory_says(
    texts: dict[tuple[int, ...], float], steps: int, chance: float
) -> None:
    model = Oracle(texts, vocab=6)
    found = law(model, f"entropy:block=0,steps={steps}", max_new_tokens=4)
    right = sum(share for t, share in found.items() if t in texts)
    assert right == pytest.approx(chance, abs=1e-4)
