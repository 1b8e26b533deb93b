"""`streaming-llm` keeps first and last tokens at the positions of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.kv.evict.streaming_llm import Streaming, StreamingLlm
from foretell.kv.slots import Slots
from foretell.spec import build_cache_policy
from foretell.strategies.plain import Plain
from tests.kv.loops import LoopLlama, check, greedy
from tests.kv.policies import PROMPT, target

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "streaming-llm:sinks=2,window=8,every=3"
LARGE_SPEC = "streaming-llm:sinks=2,window=400"


def made(spec: str) -> StreamingLlm:
    kv = build_cache_policy(f"streaming-llm:{spec}")
    assert isinstance(kv, StreamingLlm)
    return kv


def evicting(kv: StreamingLlm) -> Any:
    def evict(loop: LoopLlama) -> None:
        for rows in (rows for heads in loop.rows for rows in heads):
            full = len(rows) >= kv.sinks + kv.window + kv.every
            if full or (loop.length == len(PROMPT) and len(rows) > kv.sinks + kv.window):
                del rows[kv.sinks : len(rows) - kv.window]

    return evict


SPECS = ["sinks=2,window=7", "sinks=4,window=5,every=4", "sinks=0,window=6,every=2"]


@pytest.mark.parametrize("spec", [*SPECS, "sinks=3,window=22"])
def test_it_is_the_loop(spec: str) -> None:
    kv = made(spec)
    loop = check(kv, True, evicting(kv), PROMPT, 24)
    for rows in (rows for heads in loop.rows for rows in heads):
        places = [row.place for row in rows]
        assert places[: kv.sinks] == [*range(kv.sinks)]
        assert places[-kv.window :] == [*range(loop.length - kv.window, loop.length)]


@pytest.mark.parametrize("spec", SPECS)
def test_keys_are_those_of_their_rows_however_long_the_text(spec: str) -> None:
    """At layer 0, where a key is its token's alone."""
    kv = made(spec)
    model = target("llama", torch.float64)
    hf: Any = model.hf
    engine = Engine({"target": model})
    sampling = Sampling(temperature=0.0, max_new_tokens=90)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=kv.build_policy(model)))
    worst, most = 0.0, 0
    while engine.live:
        engine.step()
        if ("target", 0) not in live.caches or len(live.ctx.output) < 2:
            continue
        cache = live.caches["target", 0]
        assert cache.row_positions() == range(cache.base)
        read = live.ctx.tokens[: cache.length]
        tokens = torch.tensor(read[: kv.sinks] + read[cache.length - cache.base + kv.sinks :])
        first = hf.model.layers[0]
        with torch.inference_mode():
            normed = first.input_layernorm(hf.model.embed_tokens(tokens))
            unturned = first.self_attn.k_proj(normed).unflatten(1, (2, -1)).transpose(0, 1)
        loop = LoopLlama(hf, slots=True)
        want = torch.stack([loop.turned(keys, range(cache.base)) for keys in unturned])
        worst = max(worst, float((cache.k[0][:, : cache.base] - want).abs().max()))
        most = max(most, cache.base)
    assert worst < 1e-6 * float(want.abs().max())
    assert most == kv.sinks + kv.window + kv.every - 1


@pytest.mark.parametrize("spec", SPECS)
def test_a_text_may_outgrow_the_context_of_its_model(spec: str) -> None:
    """Positions are rows', so the model never sees one beyond its context."""
    kv = made(spec)
    model = target("llama", torch.float64)
    new = model.context + 40
    expected = greedy(LoopLlama(model.hf, slots=True), PROMPT, new, evicting(kv))
    engine = Engine({"target": model})
    sampling = Sampling(temperature=0.0, max_new_tokens=new)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=kv.build_policy(model)))
    for _ in engine.run():
        pass
    assert live.error is None and live.ctx.output == expected


def unturned(self: Slots, cache: Any, chosen: Any) -> Slots:
    cache.keep_rows([rows.expand(len(cache.k[0]), -1) for rows in chosen])
    cache.offset = cache.length - cache.base
    return self


def at_the_text(self: Slots, cache: Any, chosen: Any) -> Slots:
    cache.keep_rows([rows.expand(len(cache.k[0]), -1) for rows in chosen])
    return self


def turned_again(self: Slots, cache: Any, chosen: Any) -> Slots:
    """From where they were made, again and again."""
    kept = KEEP(self, cache, chosen)
    keys = {layer: keys[:, : cache.base].clone() for layer, keys in enumerate(cache.k)}
    return Slots(self.turn, self.still, keys, kept.places)


KEEP = Slots.keep_rows


@pytest.mark.parametrize("slip", [unturned, at_the_text, turned_again])
def test_the_loop_catches_slips(monkeypatch: pytest.MonkeyPatch, slip: Any) -> None:
    kv = made(SPECS[1])
    monkeypatch.setattr(Slots, "keep_rows", slip)
    with pytest.raises(AssertionError):
        check(kv, True, evicting(kv), PROMPT, 24)


@torch.inference_mode()
def test_copies_of_a_cache_evict_by_themselves() -> None:
    """What one of them gives up stays in the other, and its keys."""
    policy = made(SPECS[1]).build_policy(target())
    assert isinstance(policy, Streaming)
    policy.begin_text(len(PROMPT))
    model = target()
    cache = model.cache()
    cache.use(policy, len(PROMPT))
    twin: Any = None
    for text in (PROMPT, PROMPT + PROMPT[:8]):
        while cache.length < len(text) - 1:
            job, _ = cache.prepare(Ask(TokenTree(text[-1])), text, 4)
            model.forward([job])
            cache.commit(text)
        if twin is None:
            twin = cache.fork()
            before = [keys[:, : twin.base].clone() for keys in twin.k]
            slots = twin.policy.slots
    assert all(a[:, : twin.base].equal(b) for a, b in zip(twin.k, before, strict=True))
    assert twin.policy.slots is slots and cache.policy is not twin.policy


def test_a_model_without_rotations_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"kv=streaming-llm.*rotations"):
        made("window=8").build_policy(target("gpt2"))
