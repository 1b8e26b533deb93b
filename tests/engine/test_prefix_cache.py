"""Texts that begin as others did: the same tokens as alone, computed once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from foretell.backends.native import NativeBackend
from foretell.cache.prefix_tree import PrefixTree
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine import scheduler as schedule
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.prefix_cache import WORTH, Reuse
from foretell.engine.status import find_troubles
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.native import library
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws
from tests.backends.test_native import small
from tests.engine.test_scheduler import Wide
from tests.models.decoder.families import tiny

VOCAB = 8
MUCH = 1 << 30
PREFIX = [(5 * i + i * i) % VOCAB for i in range(2 * WORTH)]
SPECS = ("plain", "suffix", "draft:drafts=3", "token-recycling")


def reusing(models: dict[str, Any], limit: int = MUCH) -> Engine:
    engine = Engine(models)
    engine.reuse = Reuse(engine, PrefixTree(limit))
    return engine


def outputs(engine: Engine, requests: list[Request]) -> list[list[int]]:
    lives = [engine.add(request) for request in requests]
    laws.finish(engine, *lives)
    assert all(live.error is None for live in lives)
    return [live.ctx.output for live in lives]


@cache
def toys() -> dict[str, Model]:
    near = Toy(VOCAB, seed=3, noise=0.6, copy=1.5)
    return {"target": Toy(VOCAB, seed=3, copy=1.5), "draft": near}


@cache
def llamas(family: str = "llama") -> dict[str, Model]:
    near = Decoder(tiny("llama", noise=0.1, dtype=torch.float64), "near")
    return {"target": Decoder(tiny(family, dtype=torch.float64), family), "draft": near}


@pytest.mark.parametrize("world", [toys, llamas, lambda: llamas("mistral")])
def test_tokens_are_those_of_each_text_alone(world: Any) -> None:
    """Together and one after the other, drafting, greedy and sampled, in pieces."""
    models = world()
    texts = [[*PREFIX, 1, 2, 3], [*PREFIX, 5], [*PREFIX[:WORTH], 7, 7], [3], PREFIX, [*PREFIX, 5]]
    for temperature in (0.0, 0.8):
        requests = []
        for i, text in enumerate(texts):
            sampling = Sampling(max_new_tokens=8, temperature=temperature, seed=i)
            requests.append(Request(text, laws.build(SPECS[i % len(SPECS)]), sampling))
        alone = [outputs(Engine(models), [request])[0] for request in requests]
        engine = reusing(models)
        assert outputs(engine, requests) == alone
        assert engine.reuse.tree.reused >= 3 * len(PREFIX)  # type: ignore[union-attr]
        assert outputs(engine, requests) == alone
        assert not find_troubles(engine)


def test_a_prefix_is_computed_once() -> None:
    target = Wide(VOCAB)
    requests = [
        Request([*PREFIX, i, 1], laws.build("plain"), Sampling(max_new_tokens=2)) for i in range(5)
    ]
    engine = reusing({"target": target})
    outputs(engine, requests)
    apart = 5 * 6  # each one's own tokens: two of its prompt, one more to begin, its output
    assert len(PREFIX) <= target.tokens <= len(PREFIX) + apart
    told = engine.status()
    assert told["prefix_tokens_reused"] == 4 * len(PREFIX)
    assert told["running"] == told["waiting"] == told["cache_bytes"] == 0


def test_texts_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every step in which one waits for its turn, or for another's rows."""
    monkeypatch.setattr(schedule, "CHUNK", 8)
    engine = reusing({"target": Wide(VOCAB)})
    for i in range(6):
        text = [i, *PREFIX] if i < 3 else [*PREFIX, i]
        engine.add(Request(text, laws.build("plain"), Sampling(max_new_tokens=3)))
    list(engine.run())
    told = engine.status()
    assert told["prefix_tokens_asked"] == told["prompt_tokens"] - 6


def test_an_answer_is_read_again_by_the_next_turn() -> None:
    target = Wide(VOCAB)
    engine = reusing({"target": target})
    plain = laws.build("plain")
    said = outputs(engine, [Request(PREFIX, plain, Sampling(max_new_tokens=WORTH))])[0]
    before = target.tokens
    outputs(engine, [Request([*PREFIX, *said, 1, 2], plain, Sampling(max_new_tokens=1))])
    assert target.tokens - before <= 4


def test_tenants_share_nothing() -> None:
    target = Wide(VOCAB)
    engine = reusing({"target": target})
    requests = [
        Request([*PREFIX, 1], laws.build("plain"), Sampling(max_new_tokens=1), tenant=name)
        for name in ("a", "b")
    ]
    outputs(engine, requests)
    assert target.tokens >= 2 * len(PREFIX)
    assert engine.status()["prefix_tokens_reused"] == 0


def test_who_gave_up_its_rows_finds_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "CHUNK", 8)
    target = Wide(VOCAB)
    engine = reusing({"target": target})
    live = engine.add(Request(PREFIX, laws.build("plain"), Sampling(max_new_tokens=12)))
    while len(live.ctx.output) < 4:
        engine.step()
    computed = target.tokens
    assert engine.preempt_request(live)
    assert not live.caches
    laws.finish(engine, live)
    assert target.tokens - computed <= 12
    assert live.ctx.output == outputs(Engine({"target": Wide(VOCAB)}), [live.ctx.request])[0]


def test_a_text_does_not_wait_for_one_that_has_ended_or_never_computes() -> None:
    engine = reusing({"target": Wide(VOCAB)})
    first = engine.add(Request([*PREFIX, 1], laws.build("plain"), Sampling(max_new_tokens=4)))
    second = engine.add(Request([*PREFIX, 2], laws.build("plain"), Sampling(max_new_tokens=4)))
    first.paused = second.paused = False
    engine.step()
    engine.end(first)
    laws.finish(engine, second)
    assert second.error is None and len(second.ctx.output) == 4


def test_models_whose_texts_are_no_rows_keep_nothing() -> None:
    models: dict[str, Any] = {"target": ToyRecurrent(VOCAB)}
    requests = [Request([*PREFIX, 1], laws.build("plain"), Sampling(max_new_tokens=4))] * 2
    alone = outputs(Engine(models), requests)
    engine = reusing(models)
    assert outputs(engine, requests) == alone
    assert engine.status()["prefix_bytes"] == 0


@pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_the_native_step_reads_shared_rows_to_the_last_bit(family: str, format: str) -> None:
    """Greedy texts and the logits beside them, of many requests and of each alone."""
    model = Decoder(small(family, format), family, fused_blocks)
    model.use(NativeBackend)
    prefix = [(13 * i + 5) % 400 for i in range(70)]
    requests = []
    for i in range(10):
        sampling = Sampling(max_new_tokens=10, logprobs=2)
        strategy = laws.build("suffix" if i % 2 else "plain")
        requests.append(Request([*prefix, *range(3 + i)], strategy, sampling))

    def answers(engine: Engine, requests: list[Request]) -> list[Any]:
        lives: list[Live] = [engine.add(request) for request in requests]
        laws.finish(engine, *lives)
        return [(live.ctx.output, live.ctx.branches[0].logprobs) for live in lives]

    alone = [answers(Engine({"target": model}), [request])[0] for request in requests]
    engine = reusing({"target": model})
    assert answers(engine, requests) == alone
    assert engine.status()["prefix_tokens_reused"] >= 9 * len(prefix)
    assert not find_troubles(engine)
