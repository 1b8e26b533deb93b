"""`smollm2` with the LoRA weights that make it fill canvases."""

from __future__ import annotations

from typing import Any

import pytest

import foretell
from foretell.bench.suites.parallel.tasks import make_items

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def lm() -> foretell.LM:
    return foretell.load("smollm2-dlm", dtype="int8")


def test_it_fills_canvases(lm: foretell.LM) -> None:
    model: Any = lm.models["target"]
    assert (model.mask_id, model.shift, model.block) == (49152, 1, 0)
    out = lm.generate(
        [{"role": "user", "content": "What is the capital of France?"}],
        "threshold",
        max_new_tokens=32,
        temperature=0.0,
    )
    assert "Paris" in out.text
    assert out.stats.calls["target"] < 32, "some of the 32 positions were filled together"


def test_it_has_learnt_to_copy_lists_in_part(lm: foretell.LM) -> None:
    asked = make_items("copy", 8, seed=1)
    prompts = [[{"role": "user", "content": one.prompt}] for one in asked]
    answers = lm.generate(prompts, "confidence:block=32", max_new_tokens=64, temperature=0.0)
    copied = [
        f'"{entry}"' in answer.text
        for one, answer in zip(asked, answers, strict=True)
        for entry in one.question.entries
    ]
    assert sum(copied) >= 0.6 * len(copied)


def test_freedave_writes_what_static_decoding_writes(lm: foretell.LM) -> None:
    prompt = [{"role": "user", "content": "List the days of the week, one on each line."}]
    options: dict[str, Any] = {"max_new_tokens": 32, "temperature": 0.0}
    static = lm.generate(prompt, "confidence:block=32", **options)
    drafted = lm.generate(prompt, "freedave", **options)
    assert drafted.tokens == static.tokens
    assert drafted.stats.calls["target"] < static.stats.calls["target"]
