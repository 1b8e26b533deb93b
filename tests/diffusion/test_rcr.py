"""Tokens are taken back until their block is done."""

from __future__ import annotations

import pytest

from foretell.testing.toy_canvas import ToyCanvas
from tests.diffusion.worlds import calls, check_bad, check_fresh_draws, check_taken_back, filled


def test_tokens_are_taken_back_and_filled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    check_taken_back("rcr:steps=6,block=4", 6, monkeypatch)


def test_what_was_drawn_again_is_another_draw() -> None:
    check_fresh_draws("rcr:steps=2,block=0")


def test_in_one_step_a_block_is_filled_at_once() -> None:
    (ours,) = filled(ToyCanvas(), "rcr:steps=1,block=0", max_new_tokens=6)
    (base,) = filled(ToyCanvas(), "confidence:steps=1,block=0", max_new_tokens=6)
    assert ours.ctx.output == base.ctx.output and calls(ours) == 1


def test_bad_settings_are_named() -> None:
    check_bad("rcr:steps=-1")
