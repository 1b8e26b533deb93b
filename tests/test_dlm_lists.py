"""The model that comes with the package and fills canvases."""

from __future__ import annotations

from typing import Any

import pytest

import foretell
from foretell.bench.suites.parallel.tasks import make_items
from foretell.loading.fetch import fetch_shipped

FOLDER = fetch_shipped("dlm-lists")


@pytest.fixture(scope="module")
def lm() -> foretell.LM:
    return foretell.load("dlm-lists")


def test_it_is_small_and_fills_canvases(lm: foretell.LM) -> None:
    size = sum(file.stat().st_size for file in FOLDER.glob("*.safetensors"))
    assert size <= 20e6
    model: Any = lm.models["target"]
    assert "canvas" in model.caps and (model.shift, model.block) == (0, 0)
    assert model.mask_id == lm.tokenizer.mask_token_id


@pytest.mark.parametrize(("task", "room"), [("copy", 32), ("replace_index", 32), ("copy", 256)])
def test_it_has_learnt_what_it_was_made_for(lm: foretell.LM, task: str, room: int) -> None:
    """Lists of the split that it was not trained on, by what `auto` stands for. In canvases longer
    than those it was taught it would be lost, and it fills none.
    """
    asked = make_items(task, 8, seed=1)
    answers = lm.generate([one.prompt for one in asked], max_new_tokens=room, temperature=0.0)
    right = [one.score(answer.text) for one, answer in zip(asked, answers, strict=True)]
    assert sum(right) >= 7
