"""Lanes: the same tokens in each, and rows that are freed. Processes are in test_remote.py."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from foretell.cache.cache import Cache
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine import lanes
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import RequestFailed, Unsupported
from foretell.ops.threads import one_at_a_time
from foretell.strategies.parallel.mirror import Mirror
from foretell.strategies.parallel.pearl import Pearl
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import laws

RUNS = 500


def models() -> dict[str, Any]:
    draft = Toy(8, 3, noise=0.4, copy=1.5, name="draft")
    return {"target": ToyLayers(8, 3, copy=1.5), "draft": draft}


def requests(lane: str, count: int) -> list[Request]:
    """The same random ones in any lane."""
    draw = random.Random(5)
    made = []
    for seed in range(count):
        prompt = [draw.randrange(8) for _ in range(draw.randint(1, 6))]
        sampling = Sampling(
            max_new_tokens=draw.randint(1, 9),
            temperature=draw.choice([0.0, 0.7, 1.0, 1.3]),
            top_p=draw.choice([1.0, 0.8]),
            repetition_penalty=draw.choice([1.0, 1.3]),
            seed=seed,
        )
        methods = [Pearl(1, lane), Pearl(4, lane), Mirror(2, 2, lane=lane), Mirror(1, 8, lane=lane)]
        made.append(Request(prompt, draw.choice(methods), sampling))
    return made


def outputs(engine: Engine, asked: list[Request], together: int = 25) -> list[list[int]]:
    found = []
    for start in range(0, len(asked), together):
        lives = [engine.add(request) for request in asked[start : start + together]]
        laws.finish(engine, *lives)
        found += [live.ctx.output for live in lives]
    return found


def test_random_requests_have_the_same_tokens_in_a_thread() -> None:
    want = outputs(Engine(models(), (7,)), requests("inline", RUNS))
    assert outputs(Engine(models(), (7,)), requests("thread", RUNS)) == want
    assert len({tuple(output) for output in want}) > RUNS / 2


def greedy(engine: Engine, lane: str, count: int = 20) -> Live:
    live = engine.add(Request([1, 2, 1, 2], Pearl(4, lane), Sampling(max_new_tokens=count)))
    for _ in engine.run():
        pass
    return live


def test_rows_in_a_memory_that_caches_share_stay_in_the_engines_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cache, "own_memory", False, raising=False)
    live = greedy(Engine(models()), "thread")
    assert isinstance(live.error, Unsupported) and "lane=thread" in str(live.error)
    assert greedy(Engine(models()), "inline").error is None


# --- a lane by itself


class Held(lanes.OwnRows):
    """Rows whose forwards wait until they may go on."""

    may_go = threading.Event()
    began = threading.Event()
    dropped = False

    def answer(self, ask: Any, tokens: Any) -> Any:
        self.began.set()
        assert self.may_go.wait(20)
        return super().answer(ask, tokens)

    def drop(self) -> None:
        type(self).dropped = True
        super().drop()


def test_a_request_closed_while_its_lane_computes_frees_the_rows_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "OwnRows", Held)
    engine = Engine(models())
    live = engine.add(Request([1, 2], Pearl(4, "thread"), Sampling(max_new_tokens=50)))
    engine.step()
    assert Held.began.wait(20)
    engine.end(live)
    assert not engine.live and not Held.dropped, "the rows of a running forward were freed"
    Held.may_go.set()
    assert engine.pool is not None
    engine.pool.shutdown(wait=True)
    assert Held.dropped


def test_what_an_asker_raises_beside_the_engine_ends_its_request_alone() -> None:
    def processor(ids: Any, scores: Any) -> Any:
        if ids.shape[1] > 9:
            raise KeyError("broken")
        return scores

    engine = Engine(models())
    sampling = Sampling(max_new_tokens=30, logits_processors=(processor,))
    live = engine.add(Request([1, 2], Pearl(4, "thread"), sampling))
    beside = engine.add(Request([1, 2, 1, 2], Pearl(4, "thread"), Sampling(max_new_tokens=20)))
    list(engine.run())
    assert isinstance(live.error, RequestFailed) and "broken" in str(live.error)
    assert beside.error is None and len(beside.ctx.output) == 20


def test_two_threads_never_run_a_model_at_once() -> None:
    """Nor two models of the same weights, where one is a view of the other."""
    inside: list[int] = []
    most: list[int] = []

    class Slow:
        base: Any = None

        @one_at_a_time
        def forward(self) -> None:
            inside.append(1)
            threading.Event().wait(0.001)
            most.append(len(inside))
            inside.pop()

    whole, view = Slow(), Slow()
    view.base = whole

    def often(model: Slow) -> None:
        for _ in range(10):
            model.forward()

    threads = [threading.Thread(target=often, args=(model,)) for model in (whole, view, whole)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 30
