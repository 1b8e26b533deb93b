"""Random traffic: requests come and go, memory is short, prefixes are shared. Nothing is lost."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from foretell.cache.prefix_tree import PrefixTree
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine import admission
from foretell.engine import prefix_cache as reuse
from foretell.engine import scheduler as schedule
from foretell.engine.admission import Admission
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.prefix_cache import Reuse
from foretell.engine.status import find_troubles
from foretell.testing.toy import Toy
from tests import laws

VOCAB = 8
TARGET = Toy(VOCAB, seed=3, copy=1.5)
DRAFT = Toy(VOCAB, seed=3, noise=0.6, copy=1.5)
BEGINNINGS = [[(5 * i + k * i * i) % VOCAB for i in range(12 + 4 * k)] for k in range(1, 4)]
SPECS = ("plain", "suffix", "draft:drafts=3", "ngram:nodes=4")


@cache
def expected(prompt: tuple[int, ...], spec: str, tokens: int, temperature: float) -> list[int]:
    engine = Engine({"target": TARGET, "draft": DRAFT})
    live = engine.add(request(prompt, spec, tokens, temperature))
    laws.finish(engine, live)
    return live.ctx.output


def request(
    prompt: tuple[int, ...], spec: str, tokens: int, temperature: float, **terms: str | int
) -> Request:
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature, seed=len(prompt))
    return Request(list(prompt), laws.build(spec), sampling, **terms)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", (1, 1002, 1019))
def test_every_request_is_answered_as_if_it_were_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for module, name, size in (
        (admission, "RESERVE", 4),
        (reuse, "WORTH", 4),
        (schedule, "CHUNK", 16),
        (schedule, "DRAFT_CHUNK", 8),
        (schedule, "LEAST", 2),
        (schedule, "STEP", 4),
    ):
        monkeypatch.setattr(module, name, size)
    dice = random.Random(seed)
    row = TARGET.row_bytes
    engine = Engine({"target": TARGET, "draft": DRAFT})
    engine.admission = Admission(memory=150 * row, requests=6)
    engine.reuse = Reuse(engine, PrefixTree(80 * row))
    coming = 90
    known: list[tuple[Live, list[int]]] = []
    waited: dict[Live, int] = {}
    ended_early = 0
    while coming or engine.live:
        for _ in range(dice.choice((0, 0, 0, 1, 2, 5)) if coming else 0):
            coming -= 1
            tail = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 20))]
            prompt = tuple(dice.choice([[], *BEGINNINGS]) + tail)
            spec, tokens = dice.choice(SPECS), dice.randrange(1, 12)
            temperature = dice.choice((0.0, 0.9))
            terms = {"tenant": dice.choice("ab"), "priority": dice.choice((0, 0, 1))}
            live = engine.add(request(prompt, spec, tokens, temperature, **terms))
            known.append((live, expected(prompt, spec, tokens, temperature)))
            if not coming:
                break
        if engine.live and dice.random() < 0.03:
            engine.end(dice.choice(engine.live))
            ended_early += 1
        if engine.live and dice.random() < 0.05:
            live = dice.choice(engine.live)
            with torch.inference_mode():  # as in a step
                live.paused = live.paused or engine.preempt_request(live)
        engine.step()
        for live in engine.live:
            waited[live] = waited.get(live, 0) + live.paused
    done = [(live, want) for live, want in known if live.reason]
    assert len(done) >= len(known) - ended_early and ended_early < 30
    for live, want in done:
        assert live.error is None and live.ctx.output == want
        assert not live.caches
    assert max(waited.values()) < 900, "somebody was left waiting"
    told = engine.status()
    assert told["cache_bytes"] == told["running"] == told["waiting"] == 0
    assert told["prefix_tokens_reused"] > 0 and told["prefix_bytes"] <= 80 * row
    assert engine.admission.preempted or seed, "memory was never short"
    assert not find_troubles(engine)
