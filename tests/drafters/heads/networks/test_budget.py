"""A head within a number of bytes: counted with what it makes the target keep, and never beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import foretell
from foretell.engine.memory_budget import reserved_bytes
from foretell.errors import BadConfig
from tests.drafters.heads.networks.serving import folder_of
from tests.models.decoder.families import tiny

PROMPT = [(11 * i + i * i) % 90 for i in range(96)]


def lm() -> foretell.LM:
    return foretell.wrap(tiny("llama"), name="tiny")


def brought(model: foretell.LM) -> int:
    """Bytes of the heads that methods brought."""
    heads = [head for found in model.engine.brought.values() for head in found.values()]
    return sum(head.weight_bytes for head in heads)


@torch.inference_mode()
def test_a_head_runs_within_a_budget_and_the_text_stays(tmp_path: Path) -> None:
    method = f"eagle3:head={folder_of('eagle3', tmp_path)},depth=2,breadth=2,total=4"
    plain = lm().generate(PROMPT, "plain", max_new_tokens=12).tokens
    for spare in (200_000, 4_000_000):
        model = lm()
        model.generate(PROMPT, method, max_new_tokens=2)  # brings the head
        least = reserved_bytes(model.engine)
        model.limit(budget=least + spare)
        held: list[int] = []
        step = model.engine.step

        def watched(step: Any = step, engine: Any = model.engine, held: Any = held) -> Any:
            events = step()
            caches = [cache for live in engine.live for cache in live.caches.values()]
            held.append(sum(cache.allocated for cache in caches))
            return events

        model.engine.step = watched  # type: ignore[method-assign]
        out = model.generate(PROMPT, method, max_new_tokens=12)
        assert out.tokens == plain
        assert 0 < max(held) < spare
    assert out.stats.drafted > 0
    assert least == model.models["target"].weight_bytes + brought(model)


def test_a_budget_below_a_head_is_refused_with_one_that_would_do(tmp_path: Path) -> None:
    """What the head takes is known once it was read: then it counts too."""
    method = f"eagle3:head={folder_of('eagle3', tmp_path)}"
    model = lm()
    weights = model.models["target"].weight_bytes
    budget = weights + 60_000
    out, refusals = None, 0
    while out is None and refusals < 3:
        model.limit(budget=budget)
        try:
            out = model.generate(PROMPT, method, max_new_tokens=4)
        except BadConfig as error:
            refusals += 1
            assert "too small for a prompt of 96 tokens and one more" in str(error)
            budget = int(str(error).rpartition("it takes ")[2].split()[0])
    assert refusals == 2 and out is not None and len(out.tokens) == 1
    assert budget > weights + brought(model) > weights
