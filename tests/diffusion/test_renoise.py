"""Uniform noise: what is accepted, what ends a canvas, and canvases one after the other. That it is
what transformers does is in tests/models/diffusion/test_diffusion_gemma.py.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from foretell.diffusion.renoise import Renoise, bounded_positions
from foretell.errors import BadConfig, Unsupported
from foretell.spec import build_cache_policy
from foretell.testing.toy_canvas import ToyNoise
from tests.diffusion.worlds import calls, filled, law, text


def by_hand(entropies: list[float], gamma: float) -> set[int]:
    """Adds one position after the other."""
    kept: set[int] = set()
    total = 0.0
    for place in sorted(range(len(entropies)), key=entropies.__getitem__):
        if total > gamma:  # of those before it, none of which is larger
            break
        kept.add(place)
        total += entropies[place]
    return kept


def test_positions_are_accepted_while_the_bound_holds() -> None:
    torch.manual_seed(0)
    before: set[int] = set()
    entropies = torch.rand(12, dtype=torch.float64)
    entropies[3] = entropies[7] = 0.0
    for gamma in (0.0, 0.1, 0.5, 1.0, 2.0, 9.0):
        kept = bounded_positions(entropies, gamma)
        assert {*kept} == by_hand(entropies.tolist(), gamma)
        assert {*kept} >= before, "a larger bound accepts no less"
        before = {*kept}
    assert {*bounded_positions(entropies, 0.0)} >= {3, 7} and len(
        bounded_positions(entropies, 0.0)
    ) == 3
    assert len(before) == 12


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of every step: the canvas that was read, what was accepted, and the canvas after it."""
    steps: list[Any] = []
    fill = Renoise.fill_positions

    def noting(self: Renoise, sheet: Any, found: Any, state: Any) -> None:
        read = dict(sheet.shown)
        fill(self, sheet, found, state)
        steps.append((read, list(state.accepted), dict(sheet.shown)))

    monkeypatch.setattr(Renoise, "fill_positions", noting)
    return steps


def test_what_was_accepted_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens change again: at positions that were accepted in one step and not in the next."""
    steps = noted(monkeypatch)
    changed = again = 0
    for seed in range(5):
        steps.clear()
        options = {"max_new_tokens": 6, "temperature": 1.0, "seed": seed}
        model = ToyNoise(seed=seed, canvas_length=6)
        (live,) = filled(model, "renoise:steps=5,gamma=1.5", **options)
        assert len(steps) == 5 and calls(live) == 6, "five steps, and the prompt's forward"
        for (_, accepted, shown), (read, later, behind) in pairwise(steps[:-1]):
            assert read == shown and accepted
            lost = {*accepted} - {*later}
            changed += sum(shown[place] != behind[place] for place in lost)
            again += sum(shown[place] != behind[place] for place in {*accepted} & {*later})
    assert changed and again


def test_a_sure_canvas_ends_when_it_stays_the_same() -> None:
    model = ToyNoise(canvas_length=3, sharpness=1e3)
    model.compute = steady(model)  # type: ignore[method-assign]
    for stable in (0, 1, 3):
        (live,) = filled(model, f"renoise:stable={stable}", max_new_tokens=3, temperature=1.0)
        assert calls(live) == 1 + stable + 1
    (live,) = filled(model, "renoise:steps=2,stable=3", max_new_tokens=3)
    assert calls(live) == 1 + 2
    (live,) = filled(model, "renoise:sure=0,steps=7", max_new_tokens=3)
    assert calls(live) == 1 + 7


def steady(model: ToyNoise) -> Any:
    """It says the same whatever it reads."""
    compute = type(model).compute

    def same(jobs: Any, taps: Any) -> Any:
        computed = compute(model, jobs, taps)
        computed.logits[:] = 0
        computed.logits[:, 2] = 1e3
        return computed

    return same


def test_the_text_is_of_the_likeliest_tokens_and_cut_at_its_limit() -> None:
    model = ToyNoise(canvas_length=4)
    whole = text(model, "renoise:steps=3", max_new_tokens=8, temperature=1.0, seed=4)
    for limit in (1, 3, 4, 5, 7):
        options = {"max_new_tokens": limit, "temperature": 1.0, "seed": 4}
        (live,) = filled(model, "renoise:steps=3", **options)
        assert live.ctx.output == whole[:limit] and live.reason == "length"
        assert calls(live) == math.ceil(limit / 4) * 4, "whole canvases, each after its text"


def test_a_prompt_read_in_pieces_is_the_prompt() -> None:
    """Its rows are a decoder's: chunks, and other requests beside them, change nothing."""
    model = ToyNoise(vocab=7)
    long = [(3 * i * i + i) % 7 for i in range(700)]
    alone = text(model, "renoise:steps=3", long, max_new_tokens=6, temperature=1.0)
    both = filled(model, "renoise:steps=3", (1, 2), long, max_new_tokens=6, temperature=1.0)
    assert both[1].ctx.output == alone


def test_every_outcome_has_its_chance() -> None:
    """No two draws have one key, which the door of all outcomes would refuse."""
    found = law(ToyNoise(vocab=2, canvas_length=2), "renoise:steps=2,gamma=0.3", max_new_tokens=2)
    assert sum(found.values()) == pytest.approx(1, abs=1e-9) and len(found) > 2


def test_at_temperature_zero_the_best_tokens_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = noted(monkeypatch)
    texts = [text(ToyNoise(seed=3), "renoise:steps=4,gamma=9", seed=s) for s in (0, 1)]
    assert texts[0] != texts[1], "the noise that a canvas begins with is drawn"
    text(ToyNoise(), "renoise:steps=4,gamma=9", seed=0)
    assert all(len(accepted) == 4 for _, accepted, _ in steps if accepted)


def test_bad_settings_are_told() -> None:
    with pytest.raises(BadConfig, match=r"renoise:t_min=0.9: must be at most t_max \(0.8\)"):
        text(ToyNoise(), "renoise:t_min=0.9")


def test_cache_policies_of_masked_canvases_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"kv=prefix cannot run on.*leave kv out"):
        build_cache_policy("prefix").build_named(ToyNoise())
    with pytest.raises((BadConfig, Unsupported), match="streaming-llm"):
        text(ToyNoise(), "renoise", kv="streaming-llm")
