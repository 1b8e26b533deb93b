"""Who may run: memory is kept, nobody starves, everybody's tokens are those of being alone."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cache import buffers
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine import admission
from foretell.engine.admission import Admission
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import DeadlineExceeded, RequestFailed
from foretell.testing.toy import Toy, ToyRecurrent
from foretell.testing.toy_canvas import ToyCanvas
from tests import laws
from tests.diffusion.worlds import filled
from tests.diffusion.worlds import request as asked

VOCAB = 8
TARGET = Toy(VOCAB, seed=3, copy=1.5)
ROW = TARGET.row_bytes


@pytest.fixture(autouse=True)
def reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RESERVE", 4)


def engine_with(**limits: Any) -> Engine:
    engine = Engine({"target": TARGET})
    engine.admission = Admission(**limits)
    return engine


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers have no rows to spare, so that limits can be given in rows."""
    monkeypatch.setattr(buffers, "ROUND", 1)
    monkeypatch.setattr(buffers, "SPARE", 1 << 30)


def request(length: int, tokens: int = 6, spec: str = "plain", **terms: Any) -> Request:
    prompt = [(3 * i + length) % VOCAB for i in range(length)]
    return Request(prompt, laws.build(spec), Sampling(max_new_tokens=tokens), **terms)


def alone(one: Request) -> list[int]:
    engine = Engine({"target": TARGET})
    live = engine.add(one)
    laws.finish(engine, live)
    return live.ctx.output


def held(engine: Engine) -> int:
    return sum(cache.allocated for live in engine.live for cache in live.caches.values())


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 1)), max_size=8),
    st.integers(24, 60),
    st.sampled_from(["plain", "suffix"]),
)
def test_rows_stay_within_the_memory_and_tokens_are_those_of_each_alone(
    wanted: list[tuple[int, int, int]], rows: int, spec: str
) -> None:
    engine = engine_with(memory=rows * ROW)
    requests = [request(n, tokens, spec, priority=p) for n, tokens, p in wanted]
    lives = [engine.add(one) for one in requests]
    most = 0
    while engine.live:
        engine.step()
        most = max(most, held(engine))
        for live in engine.live:
            assert not live.paused or not live.caches, "who waits holds no rows"
    # A step's new rows are counted before the next one.
    assert most <= rows * ROW + len(lives) * 20 * ROW
    assert [live.ctx.output for live in lives] == [alone(one) for one in requests]


def test_requests_give_up_their_rows_and_go_on() -> None:
    engine = engine_with(memory=30 * ROW)
    requests = [request(8, 20), request(9, 20)]
    lives = [engine.add(one) for one in requests]
    while engine.live:
        engine.step()
    assert engine.admission.preempted > 0
    assert engine.status()["preempted"] == engine.admission.preempted
    assert [live.ctx.output for live in lives] == [alone(one) for one in requests]


def test_the_number_of_running_requests_is_kept() -> None:
    engine = engine_with(requests=2)
    lives = [engine.add(request(3 + i)) for i in range(5)]
    while engine.live:
        engine.step()
        assert sum(not live.paused for live in engine.live) <= 2
    assert all(live.reason == "length" for live in lives)


def order(engine: Engine, lives: list[Live]) -> list[int]:
    """The lives by when they ended."""
    ended: list[int] = []
    while engine.live:
        engine.step()
        ended += [live.index for live in lives if live.reason and live.index not in ended]
    return ended


def test_higher_priorities_come_first_and_equal_ones_in_order() -> None:
    engine = engine_with(requests=1)
    lives = [engine.add(request(3, priority=p)) for p in (0, 2, 1, 2)]
    assert order(engine, lives) == [1, 3, 2, 0]


def test_nobody_waits_for_ever_behind_higher_priorities() -> None:
    engine = engine_with(requests=1)
    now = time.perf_counter()
    lives = [engine.add(request(3, priority=p)) for p in (0, 2, 1)]
    lives[0].started = now - 2.1 * admission.AGE
    assert order(engine, lives) == [0, 1, 2]
    # Among equals age is no priority: a tenant's many old requests do not hold up another's.
    lives = [engine.add(request(3, tenant=name)) for name in ("many", "many", "many", "one")]
    for live in lives[:3]:
        live.started = now - 9 * admission.AGE
    assert order(engine, lives) == [3, 6, 4, 5]


def test_a_tenant_with_many_requests_does_not_hold_up_another() -> None:
    engine = engine_with(requests=1)
    lives = [engine.add(request(8, tenant="many")) for _ in range(6)]
    lives.append(engine.add(request(8, tenant="one")))
    assert order(engine, lives).index(6) <= 1


def test_who_was_away_has_saved_up_no_claims() -> None:
    served = Counter({"busy": 1000})
    admitting = Admission(served=served)
    engine = engine_with()
    engine.admission = admitting
    engine.add(request(3, tenant="busy"))
    engine.add(request(3, tenant="new"))
    assert served["new"] == 1000


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    engine = engine_with(memory=30 * ROW)
    first = engine.add(request(8, 4))
    large = engine.add(request(20, 2))
    small = [engine.add(request(2, 2)) for _ in range(4)]
    ended = order(engine, [first, large, *small])
    assert ended[0] == first.index and ended.index(large.index) <= 2


def test_a_request_that_can_never_fit_fails_with_the_cure() -> None:
    engine = engine_with(memory=12 * ROW)
    live = engine.add(request(8, 40))
    while engine.live:
        engine.step()
    assert isinstance(live.error, RequestFailed) and "allow more memory" in str(live.error)
    assert not live.caches


def test_who_is_late_ends_with_what_there_is() -> None:
    engine = engine_with(requests=1)
    late = time.perf_counter() - 1
    running = engine.add(request(3, 50))
    engine.step()
    engine.step()
    running.ctx.request.deadline = late
    waiting = engine.add(request(3, deadline=late))
    good = engine.add(request(3))
    while engine.live:
        engine.step()
    for live in (running, waiting):
        assert isinstance(live.error, DeadlineExceeded) and "more time" in str(live.error)
    assert len(running.ctx.output) == 1 and not waiting.ctx.output
    assert good.error is None and len(good.ctx.output) == 6


def test_states_that_cannot_be_computed_again_are_not_given_up() -> None:
    model = ToyRecurrent(VOCAB)
    engine = Engine({"target": model})
    engine.admission = Admission(memory=1 << 20, requests=1)
    lives = [engine.add(request(4)), engine.add(request(5))]
    while engine.live:
        engine.step()
    assert all(live.error is None for live in lives)


@pytest.mark.parametrize(("method", "copies"), [("confidence:block=4", 1), ("freedave:block=4", 5)])
def test_a_canvas_takes_all_its_rows_from_the_beginning(method: str, copies: int) -> None:
    """Beside another one only where both fit; and what is paused goes on to the same text."""
    model = ToyCanvas()
    prompts = [(0,), (1, 2), (3,)]
    alone = [filled(model, method, prompt)[0].ctx.output for prompt in prompts]
    for held_at_once in (1, 2):
        engine = Engine({"target": model})
        engine.admission = Admission(memory=held_at_once * copies * 10 * model.row_bytes)
        lives = [engine.add(asked(model, method, prompt)) for prompt in prompts]
        most = 0
        while engine.live:
            engine.step()
            most = max(most, engine.running)
            if engine.running > 1:
                assert held(engine) <= engine.admission.memory
        assert most == held_at_once or copies > 1  # which are not all there in every step
        assert [live.ctx.output for live in lives] == alone
