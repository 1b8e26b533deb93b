"""Lanes in processes, at a length that other tests do not have, and on the embedded pair."""

from __future__ import annotations

import pytest

import foretell
from foretell.engine.engine import Engine
from tests.engine.test_lanes import RUNS, models, outputs, requests

pytestmark = pytest.mark.real


def test_random_requests_have_the_same_tokens_in_a_process() -> None:
    want = outputs(Engine(models(), (7,)), requests("inline", RUNS))
    assert outputs(Engine(models(), (7,)), requests("process", RUNS)) == want


@pytest.mark.parametrize("lane", ["thread", "process"])
def test_the_embedded_pair_writes_the_same_in_every_lane(lane: str) -> None:
    lm = foretell.load("demo", dtype="float32", backend="torch")
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 60, "temperature": temperature, "seed": 3}
        inline = lm.generate(lm.encode("The quick brown fox"), "pearl", **options)
        beside = lm.generate(lm.encode("The quick brown fox"), f"pearl:lane={lane}", **options)
        assert beside.tokens == inline.tokens
        assert beside.stats.calls == inline.stats.calls
    plain = lm.generate(lm.encode("The quick brown fox"), "plain", max_new_tokens=60)
    greedy = lm.generate(lm.encode("The quick brown fox"), f"pearl:lane={lane}", max_new_tokens=60)
    assert greedy.tokens == plain.tokens and greedy.stats.accepted
