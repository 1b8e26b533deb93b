"""Its order: see foretell/diffusion/margin.py."""

from __future__ import annotations

from foretell.testing.toy_canvas import Oracle
from tests.diffusion.worlds import calls, check_bad, check_joint_law, filled


def test_one_token_a_step_draws_from_the_joint_law() -> None:
    check_joint_law("margin")


def test_bad_settings_are_named() -> None:
    check_bad("margin:steps=-1", "margin:block=-2")


def test_positions_are_ranked_by_the_margin() -> None:
    """The third position is the surest, though its likeliest token is less likely than the first's
    best two together."""
    texts = {(0, 0, 2): 0.45, (1, 0, 2): 0.4, (2, 1, 2): 0.1, (2, 2, 0): 0.05}
    (live,) = filled(Oracle(texts, vocab=4), "margin:block=0,steps=3", max_new_tokens=3)
    assert list(live.ctx.output) == [0, 0, 2] and calls(live) == 3
