"""Canvases to fill, and how they are filled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from foretell.core.masked_text import Sheet
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig
from foretell.spec import build_cache_policy, resolve_method
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy_canvas import Oracle, ToyCanvas, all_orders, all_replacements


def request(
    model: Any,
    method: str,
    prompt: Sequence[int] = (0,),
    kv: str | None = None,
    rng: Any = None,
    inputs: Any = None,
    **sampling: Any,
) -> Request:
    policy = None if kv is None else build_cache_policy(kv).build_named(model)
    name, strategy = resolve_method(method)
    options = {"max_new_tokens": 8, "temperature": 0.0, **sampling}
    extra = {"inputs": inputs} if inputs else {}
    return Request(
        list(prompt), strategy, Sampling(**options), name, policy=policy, rng=rng, **extra
    )


def filled(model: Any, method: str, *prompts: Sequence[int], **options: Any) -> list[Live]:
    """Canvases after these prompts, side by side."""
    engine = Engine({"target": model})
    requests = [request(model, method, prompt, **options) for prompt in prompts or [(0,)]]
    lives = [engine.add(made) for made in requests]
    for _ in engine.run():
        pass
    for live in lives:
        if live.error is not None:
            raise live.error
    return lives


def text(model: Any, method: str, prompt: Sequence[int] = (0,), **options: Any) -> list[int]:
    (live,) = filled(model, method, prompt, **options)
    return list(live.ctx.output)


def calls(live: Live) -> int:
    """Forwards of the target."""
    return int(live.ctx.stats.calls["target"])


def law(model: ToyCanvas, method: str, **options: Any) -> dict[tuple[int, ...], float]:
    """The probability of every text at temperature 1, by enumeration."""
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def run(door: Enumerator) -> tuple[int, ...]:
        return tuple(text(model, method, rng=door, temperature=1.0, **options))

    for weight, value in Enumerator.walk_outcomes(run):
        found[value] += weight
    return dict(found)


def distance(ours: dict[tuple[int, ...], float], theirs: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return sum(abs(ours.get(t, 0) - theirs.get(t, 0)) for t in {*ours, *theirs}) / 2


LISTS = {"shuffle": all_orders([0, 1, 2]), "replace": all_replacements([0, 1, 2, 3], 4)}


def check_joint_law(name: str) -> None:
    """With one token a step it draws from the joint law of a model with exact conditionals."""
    for texts in (*LISTS.values(), UNEVEN):
        model = Oracle(texts, vocab=6)
        found = law(model, f"{name}:block=0", max_new_tokens=len(next(iter(texts))))
        assert distance(found, texts) < 1e-9


UNEVEN = {(0, 0): 0.5, (0, 1): 0.2, (1, 0): 0.3}


def check_one_by_one(off: str, base: str) -> None:
    """With this setting it commits one token a step, as `base` does."""
    for seed in range(6):
        model = ToyCanvas(seed=seed)
        options = {"max_new_tokens": 9, "temperature": 0.7, "seed": seed}
        (ours,) = filled(model, f"{off},block=4", **options)
        (plain,) = filled(model, f"{base}:block=4", **options)
        assert ours.ctx.output == plain.ctx.output and calls(ours) == calls(plain) == 9


def check_sure_together(method: str) -> None:
    """Tokens that are sure are committed in one step, and those that are not are not."""
    sure = {(0, 1, 2, 3): 0.97, (3, 2, 1, 0): 0.03}
    (live,) = filled(Oracle(sure, vocab=5), method, max_new_tokens=4)
    assert list(live.ctx.output) == [0, 1, 2, 3] and calls(live) == 1
    unsure = {(0, 1, 2, 3): 0.6, (3, 2, 1, 0): 0.4}
    (live,) = filled(Oracle(unsure, vocab=5), method, max_new_tokens=4)
    assert list(live.ctx.output) == [0, 1, 2, 3] and calls(live) == 2


def check_bad(*specs: str) -> None:
    """Each of these settings is refused by name."""
    for spec in specs:
        name, _, given = spec.partition(":")
        with pytest.raises(
            BadConfig, match=f"{name}:{given.partition('=')[0]}|{given.partition('=')[0]}"
        ):
            text(ToyCanvas(), spec)


def check_taken_back(method: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 tokens in blocks of 4 some are masked again, and that changes the text."""
    back = []
    mask = Sheet.mask

    def noted(self: Sheet, place: int) -> None:
        back.append(place)
        mask(self, place)

    monkeypatch.setattr(Sheet, "mask", noted)
    changed = 0
    for seed in range(4):
        model = ToyCanvas(seed=seed)
        back.clear()
        options = {"max_new_tokens": 12, "temperature": 0.9, "seed": seed}
        (live,) = filled(model, method, **options)
        assert back and calls(live) == steps and len(live.ctx.output) == 12
        changed += list(live.ctx.output) != text(model, "confidence:block=4", **options)
    assert changed


def check_fresh_draws(method: str) -> None:
    """What is drawn again is another draw: the enumerator refuses a key that is used twice."""
    found = law(ToyCanvas(vocab=3), method, max_new_tokens=3)
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
