"""A clock decides what is committed: see foretell/diffusion/origin.py."""

from __future__ import annotations

import pytest

from foretell.testing.toy_canvas import Oracle, ToyCanvas, all_orders
from tests.diffusion.worlds import calls, check_bad, filled, law


def test_the_law_is_that_of_its_coins() -> None:
    """Two positions, two steps: at the first each is committed with probability (1 - eps) / 2."""
    texts = all_orders([0, 1])
    found = law(Oracle(texts, vocab=3), "origin:eps=0.001", max_new_tokens=2)
    chance = (1 - 1e-3) / 2
    apart = 2 * chance * (1 - chance)  # one of them is known before the other is drawn
    right = sum(share for text, share in found.items() if text in texts)
    assert right == pytest.approx(apart + (1 - apart) / 2, abs=1e-9)


def test_steps_without_a_token_make_no_forward() -> None:
    for seed in range(5):
        (live,) = filled(ToyCanvas(), "origin:steps=64", max_new_tokens=8, seed=seed)
        assert calls(live) <= 8 and len(live.ctx.output) == 8
        (live,) = filled(ToyCanvas(), "origin:steps=1", max_new_tokens=8, seed=seed)
        assert calls(live) == 1


def test_bad_settings_are_named() -> None:
    check_bad("origin:steps=-1", "origin:eps=1")
