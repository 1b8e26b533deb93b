"""Canvases to fill, and how they are filled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from foretell.core.engine import Engine
from foretell.core.live import Live
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.families.toy_canvas import ToyCanvas
from foretell.measure.outcomes import Enumerator
from foretell.spec import kv_of, resolve


def request(
    model: Any,
    method: str,
    prompt: Sequence[int] = (0,),
    kv: str | None = None,
    rng: Any = None,
    inputs: Any = None,
    **sampling: Any,
) -> Request:
    policy = None if kv is None else kv_of(kv).named(model)
    name, strategy = resolve(method)
    options = {"max_new_tokens": 8, "temperature": 0.0, **sampling}
    extra = {"inputs": inputs} if inputs else {}
    return Request(
        list(prompt), strategy, Sampling(**options), name, policy=policy, rng=rng, **extra
    )


def filled(model: Any, method: str, *prompts: Sequence[int], **options: Any) -> list[Live]:
    """Canvases behind these prompts, side by side."""
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
    """The chance of every text at temperature 1, by enumeration."""
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def run(door: Enumerator) -> tuple[int, ...]:
        return tuple(text(model, method, rng=door, temperature=1.0, **options))

    for weight, value in Enumerator.walk(run):
        found[value] += weight
    return dict(found)


def distance(ours: dict[tuple[int, ...], float], theirs: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return sum(abs(ours.get(t, 0) - theirs.get(t, 0)) for t in {*ours, *theirs}) / 2
