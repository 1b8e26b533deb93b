"""Tokens are taken back near the end of a block."""

from __future__ import annotations

import pytest

from foretell.testing.toy_canvas import ToyCanvas
from tests.diffusion.worlds import check_bad, check_fresh_draws, check_taken_back, text


def test_without_further_steps_nothing_is_taken_back() -> None:
    for seed in range(4):
        model = ToyCanvas(seed=seed)
        ours = text(model, "remdm:further=0,block=4,steps=6", max_new_tokens=12)
        assert ours == text(model, "confidence:block=4,steps=6", max_new_tokens=12)


def test_tokens_are_taken_back_and_filled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    check_taken_back("remdm:further=3,block=4", 12 + 3 * 3, monkeypatch)


def test_what_was_drawn_again_is_another_draw() -> None:
    check_fresh_draws("remdm:further=1,block=0")


def test_bad_settings_are_named() -> None:
    check_bad("remdm:further=-1", "remdm:count=0")
