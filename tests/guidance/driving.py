"""What holds for every source of rows, and plain loops over a toy's layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.testing.toy_layers import ToyLayers
from tests import laws


def early_row(toy: ToyLayers, text: Sequence[int], layers: int) -> list[float]:
    """Logits (V,) that the toy's head makes of what leaves its first layers after a text."""
    tokens, positions = np.array(text, dtype=np.float64), np.arange(len(text), dtype=np.float64)
    states = toy.embedded(tokens)
    for layer in range(layers):
        seen = [(states[: n + 1, 0], positions[: n + 1]) for n in range(len(text))]
        states = toy.after_mlp(layer, toy.attended(layer, states, seen))
    return [float(x) for x in states[-1, 1:]]


def keep_plausible(mixed: Sequence[float], logs: Sequence[float], least: float) -> list[float]:
    """`mixed`, and far below it tokens whose chance is less than `least` times the best one's."""
    top = max(logs)
    pairs = list(zip(mixed, logs, strict=True))
    lowest = min(m for m, x in pairs if math.exp(x - top) >= least)
    return [m if math.exp(x - top) >= least else lowest - 1000 + x - top for m, x in pairs]


def greedy(spec: str, source: Source | None, engine: Engine, **more: Any) -> list[Live]:
    strategy = laws.build(spec)
    sampling = Sampling(max_new_tokens=14, **more)
    lives = [
        engine.add(Request(prompt, strategy, sampling, source=source))
        for prompt in laws.prompts(6, 8)
    ]
    laws.finish(engine, *lives)
    return lives


def engine_for(spec: str, source: Source) -> Engine:
    return Engine(laws.world(laws.build(spec), 8, copy=2.0, source=source), (7,))


def check_drafts(source: Source, spec: str, **sampling: Any) -> None:
    """A drafter gives the tokens of plain decoding with the source, in fewer forwards."""
    plain = greedy("plain", source, engine_for(spec, source), **sampling)
    lives = greedy(spec, source, engine_for(spec, source), **sampling)
    assert [live.ctx.output for live in lives] == [live.ctx.output for live in plain]
    assert sum(live.ctx.stats.accepted for live in lives), "nothing was accepted"


def check_off(source: Source) -> None:
    """The rows are the target's own, bit for bit, and nothing else is read."""
    for spec in ("plain", "ngram"):
        engine = engine_for(spec, source)
        own = greedy(spec, None, engine, logprobs=3)
        lives = greedy(spec, source, engine_for(spec, source), logprobs=3)
        for live, want in zip(lives, own, strict=True):
            assert live.ctx.output == want.ctx.output and live.logprobs == want.logprobs
            assert live.ctx.stats.calls == want.ctx.stats.calls
            assert len(live.ctx.branches) == 1


def check_batch(source: Source) -> None:
    """The tokens are the same alone and among others; closed at any step, no rows are left."""
    strategy = laws.build("draft:drafts=2")
    models = laws.world(strategy, 8, copy=1.5, source=source)
    requests = []
    for i, prompt in enumerate(laws.prompts(8, 8)):
        sampling = Sampling(temperature=float(i % 3 > 0), max_new_tokens=9, seed=i)
        requests.append(
            Request(prompt, strategy, sampling, source=source if i % 2 else laws.DIRECT)
        )
    alone = []
    for request in requests:
        engine = Engine(models)
        live = engine.add(request)
        laws.finish(engine, live)
        alone.append(live.ctx.output)
    engine = Engine(models)
    lives = [engine.add(request) for request in requests]
    laws.finish(engine, *lives)
    assert [live.ctx.output for live in lives] == alone
    for count in range(1, 9):
        engine = Engine(models)
        live = engine.add(requests[1])
        for _ in range(count):
            engine.step()
        caches = dict(live.caches)
        if not engine.live:
            break
        texts = {branch: list(text.tokens) for branch, text in live.ctx.branches.items()}
        engine.end(live)
        assert caches and not live.caches and not engine.live
        for (name, branch), held in caches.items():
            assert held.sharers == [0]
            laws.check_cache(held, models[name], texts[branch])
    assert count > 3
