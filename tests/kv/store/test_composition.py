"""Policies that are joined: which may be, and that rows are given up before they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, UnknownMethod
from foretell.kv.evict.snapkv import Snapkv
from foretell.kv.store.base import Stored
from foretell.kv.store.composition import Composition, EvictedFirst
from foretell.kv.store.gear import Gear, Recipe
from foretell.kv.store.spilling import Files
from foretell.spec import build_cache_policy
from foretell.strategies.plain import Plain
from tests.kv.policies import PROMPT, run, target

SNAPKV = "snapkv:budget=10,window=3,kernel=3"


def test_all_three_in_any_order(tmp_path: Path) -> None:
    specs = [SNAPKV, "gear:buffer=4", f"offload:dir={tmp_path}/a+b"]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        kv = build_cache_policy("+".join(specs[place] for place in order))
        policy = kv.build_named(target())
        assert policy.name == kv.name and "gear" in kv.name
        assert isinstance(policy, EvictedFirst) and policy.evictor.budget == 10
        assert isinstance(policy.stored.form, Recipe)
        assert policy.stored.shelf == Files(tmp_path / "a+b", policy.stored.shelf.cure)


def test_pairs_are_made_of_what_they_name(tmp_path: Path) -> None:
    stored = build_cache_policy(f"gear:buffer=7+offload:dir={tmp_path},block=3").build_policy(
        target()
    )
    assert isinstance(stored, Stored) and stored.block == 7 and not stored.shelf.in_memory
    pair = build_cache_policy(f"{SNAPKV}+gear").build_policy(target())
    assert isinstance(pair, EvictedFirst) and pair.stored.shelf.in_memory
    assert isinstance(build_cache_policy("gear"), Gear), "one alone is no composition"
    assert isinstance(Composition((Gear(),)).build_policy(target()), Stored)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("snapkv+h2o", "two evictors: snapkv and h2o"),
        ("gear+block-quantization", "two encoders: gear and block-quantization"),
        ("gear+offload+offload", "two stores: offload and offload"),
        ("quest+gear", "quest reads the rows of one cache"),
        ("snapkv+double-sparsity", "double-sparsity reads the rows of one cache"),
        *((f"{name}+gear", f"{name} gives up rows at every step") for name in ("h2o", "tova")),
        ("streaming-llm+offload", "streaming-llm gives up rows at every step"),
        ("gear+treekv", "treekv gives up rows at every step"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_one_line(spec: str, why: str) -> None:
    with pytest.raises(BadConfig) as refused:
        build_cache_policy(spec)
    message = str(refused.value)
    assert message.startswith(f"kv={spec}: ") and why in message and "\n" not in message
    assert "an evictor of prompts (snapkv), an encoder" in message, "what is legal is said"


def test_a_wrong_part_is_named() -> None:
    with pytest.raises(UnknownMethod, match="did you mean gear"):
        build_cache_policy("snapkv+gaer")
    with pytest.raises(BadConfig, match="gear:bits=3"):
        build_cache_policy("snapkv+gear:bits=3")
    with pytest.raises(BadConfig, match="nothing is joined"):
        Composition(())


def held(kv: Any, prompt: list[int]) -> list[tuple[int, int, int]]:
    """Of a text after each step: its length, and its rows in the cache and stored."""
    engine = Engine({"target": target()})
    sampling = Sampling(temperature=0.0, max_new_tokens=14)
    live = engine.add(Request(prompt, Plain(), sampling, policy=kv.build_policy(target())))
    seen = []
    while engine.live:
        engine.step()
        cache = live.caches.get(("target", 0))
        if cache is not None:
            seen.append((cache.length, cache.base, cache.policy.stored.rows))
    return seen


@pytest.mark.parametrize("count", [21, 12, 10, 6])
def test_rows_are_given_up_before_they_are_stored(count: int) -> None:
    for length, own, stored in held(build_cache_policy(f"{SNAPKV}+gear:buffer=4"), PROMPT[:count]):
        if length < count:
            assert (own, stored) == (length, 0)
        else:
            left = min(count, 10) + length - count
            assert (own, stored) == (left % 4, left - left % 4)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:7]])
def test_stored_rows_are_those_that_were_left(prompt: list[int], tmp_path: Path) -> None:
    evicted = Snapkv(10, window=3, kernel=3)
    (want,) = run(target(), [prompt], evicted)
    (live,) = run(
        target(), [prompt], build_cache_policy(f"{SNAPKV}+offload:dir={tmp_path},block=4")
    )
    assert live.ctx.output == want.ctx.output
    assert not [*tmp_path.iterdir()]


def test_forks_and_drops_reach_both_parts(tmp_path: Path) -> None:
    policy = build_cache_policy(f"{SNAPKV}+offload:dir={tmp_path},block=4").build_policy(target())
    engine = Engine({"target": target()})
    sampling = Sampling(temperature=0.0, max_new_tokens=9)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy))
    while len(live.ctx.output) < 3:
        engine.step()
    cache = live.caches["target", 0]
    fork = cache.fork()
    assert fork.policy.stored is not cache.policy.stored
    assert fork.policy.evictor is not cache.policy.evictor
    engine.end(live)
    assert [*tmp_path.iterdir()]
    assert fork.policy.bytes == 0, "files are no memory"
    fork.drop()
    assert not [*tmp_path.iterdir()]
