"""Rows that are held beside a cache are read as if they had stayed in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.kv.store.holding import Holding, Layers, Part
from foretell.ops.attention import Attention
from foretell.strategies.plain import Plain
from tests import laws
from tests.cache.users import by_chunks
from tests.kv.policies import PROMPT, drafted, run, target

TOKENS = 24


@dataclass
class AsTheyAre(Holding):
    """Holds rows in the form in which they came; `lost`: forgets the newest of each layer."""

    lost: int = 0
    keys: tuple[Layers, ...] = ()
    values: tuple[Layers, ...] = ()

    def clear_held(self) -> None:
        self.keys, self.values = (), ()

    @property
    def holds_rows(self) -> bool:
        return bool(self.keys)

    def hold_rows(self, keys: Layers, values: Layers) -> None:
        self.keys, self.values = (*self.keys, keys), (*self.values, values)

    def attend_held(self, job: Any, asked: Attention) -> Sequence[Part]:
        keys = torch.cat([rows[asked.layer] for rows in self.keys], 1)
        values = torch.cat([rows[asked.layer] for rows in self.values], 1)
        end = keys.shape[1] - self.lost
        return [asked.over(keys[:, :end], values[:, :end])]


def texts(policy: Holding | None, strategy: Any = None, chunk: int = 1000) -> list[list[int]]:
    """Of three prompts side by side; and holds that a cache keeps no more than it should."""
    engine = Engine({"target": target("llama", torch.float64)}, plan=by_chunks(chunk))
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    requests = [
        Request(list(prompt), strategy or Plain(), sampling, policy=policy)
        for prompt in (PROMPT, PROMPT[5:], PROMPT[:3])
    ]
    lives = [engine.add(request) for request in requests]
    while engine.live:
        engine.step()
        for live in lives:
            cache = live.caches.get(("target", 0))
            if policy is not None and cache is not None and cache.length >= len(PROMPT):
                assert cache.base < policy.first_rows + policy.recent + policy.block
    return [list(live.ctx.output) for live in lives]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("first", [0, 2])
def test_nothing_is_lost(whole: bool, first: int) -> None:
    policy = AsTheyAre(first, recent=4, block=3, whole=whole)
    want = texts(None)
    assert texts(policy) == want
    assert texts(policy, chunk=2) == want


def test_a_lost_row_shows() -> None:
    assert texts(AsTheyAre(2, 4, 3, lost=1)) != texts(None)


@pytest.mark.parametrize("wrong", [0, 3, 10])
def test_drafts_leave_the_text_as_it_is(wrong: int) -> None:
    policy = AsTheyAre(1, recent=3, block=5, lost=1)
    model = target("llama", torch.float64)
    engine = Engine({"target": model})
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    plain = engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy))
    laws.finish(engine, plain)
    strategy = drafted(plain.ctx.output, wrong)
    live = engine.add(Request(list(PROMPT), strategy, sampling, policy=policy))
    laws.finish(engine, live)
    assert live.ctx.output == plain.ctx.output


def test_a_cache_that_is_computed_anew_holds_the_same() -> None:
    (want,) = run(target("llama", torch.float64), [PROMPT], None)
    policy = AsTheyAre(1, recent=3, block=5)
    engine = Engine({"target": target("llama", torch.float64)})
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy))
    while engine.live:
        engine.step()
        if engine.live and len(live.ctx.output) in (5, 14):
            live.caches["target", 0].forget()
    assert live.ctx.output == want.ctx.output
