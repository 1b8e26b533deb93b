"""Its order: see foretell/diffusion/random.py."""

from __future__ import annotations

from typing import Any

from foretell.testing.toy_canvas import ToyCanvas
from tests.diffusion.worlds import check_bad, check_joint_law, text


def test_one_token_a_step_draws_from_the_joint_law() -> None:
    check_joint_law("random")


def test_bad_settings_are_named() -> None:
    check_bad("random:steps=-1", "random:block=-2")


def test_only_rows_of_the_drawn_positions_are_read() -> None:
    model = ToyCanvas()
    seen = []
    forward = model.forward

    def noted(jobs: Any) -> Any:
        seen.append(len(jobs[0].rows))
        return forward(jobs)

    model.forward = noted  # type: ignore[method-assign]
    text(model, "random:block=0,steps=3", max_new_tokens=7)
    assert seen == [3, 2, 2]
