"""Drafting's seconds: a generator's own and its shares of forwards, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply, Sampling, Steps
from foretell.engine.engine import Engine
from foretell.speculation.draft_size import Policy
from foretell.speculation.stopwatch import Stopwatch
from foretell.testing.toy import Toy
from tests import laws


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Time stands still unless a test moves it."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    yield now


def reply(seconds: float) -> Reply:
    return Reply(torch.zeros(1, 1), {}, [0], seconds=seconds)


def test_only_the_generators_own_time_and_its_share_of_forwards_count(clock: list[float]) -> None:
    def steps() -> Steps:
        clock[0] += 2.0
        first = yield Ask(TokenTree(0))
        assert first.seconds == 0.25
        clock[0] += 3.0
        several = yield [Ask(TokenTree(0)), Ask(TokenTree(0))]
        assert len(several) == 2
        clock[0] += 1.0
        return "result"

    watch = Stopwatch()
    over = watch.time_messages(steps())
    next(over)
    clock[0] += 50.0  # other requests' work
    over.send(reply(0.25))
    clock[0] += 70.0
    with pytest.raises(StopIteration) as end:
        over.send([reply(0.5), reply(0.125)])
    assert end.value.value == "result"
    assert watch.seconds == 2 + 3 + 1 + 0.25 + 0.5 + 0.125


def test_what_is_thrown_in_reaches_the_generator_and_closing_closes_it(clock: list[float]) -> None:
    heard: list[object] = []

    def steps() -> Steps:
        try:
            yield Ask(TokenTree(0))
        except OSError as error:
            heard.append(error)
            clock[0] += 4.0
        try:
            yield Ask(TokenTree(0))
        finally:
            heard.append("closed")

    watch = Stopwatch()
    over = watch.time_messages(steps())
    next(over)
    over.throw(OSError("a call failed"))
    over.close()
    assert len(heard) == 2 and watch.seconds == 4.0


class Slow(Toy):
    """Every forward takes a second of the clock."""

    clock: list[float]

    def forward(self, jobs: object) -> list[Reply]:
        self.clock[0] += 1.0
        return super().forward(jobs)  # type: ignore[arg-type]


def test_drafting_is_not_charged_with_what_others_do(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen requests share each forward of the draft model: together they are charged it once."""
    seconds = []
    real = Policy.fit_tree

    def fit(self: Policy, tree: TokenTree, spent: float = 0.0) -> TokenTree:
        seconds.append(spent)
        return real(self, tree, spent)

    monkeypatch.setattr(Policy, "fit_tree", fit)
    Slow.clock = clock
    engine = Engine({"target": Slow(8), "draft": Slow(8, noise=0.3, name="draft")})
    sampling = Sampling(max_new_tokens=9)
    strategy = laws.build("draft:length=2")
    lives = [engine.add(Request([1, i % 8], strategy, sampling)) for i in range(16)]
    laws.finish(engine, *lives)
    assert len(seconds) > 32 and sum(seconds) == pytest.approx(engine.models["draft"].calls)
    assert sum(live.ctx.stats.draft_s for live in lives) > 8 * sum(seconds), "in full for each"
