"""Our methods, measured step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.bench.contenders import CommitMark, EngineRun, Method, Watched
from foretell.bench.figures import step_timeline
from foretell.core.stats import Stats
from foretell.core.types import Commit, Kept, Steps
from foretell.spec import resolve_method
from foretell.speculation.strategy import Strategy
from tests import tiny
from tests.bench.fakes import PROMPTS


def test_a_method_is_measured_step_by_step() -> None:
    lm = tiny.lm()
    ids = lm.encode("one two one two one two one")
    run = Method(lm, "draft:length=3,nodes=3").run([ids], 24, 0.0, 0)[0]
    expected = tiny.lm().generate(ids, "draft:length=3,nodes=3", max_new_tokens=24)
    assert isinstance(run, EngineRun)
    assert run.tokens == expected.tokens
    assert sum(run.counts) == 24
    assert run.times == sorted(run.times)
    assert len(run.marks) == run.stats.steps + 1
    line = step_timeline(run)
    assert sum(step[1] for step in line) == expected.stats.drafted > 0
    assert sum(step[2] for step in line) == expected.stats.accepted > 0
    assert sum(step[3] for step in line) == pytest.approx(run.times[-1])


def test_a_method_brings_its_models() -> None:
    """A head, for one."""
    brought = {"head": SimpleNamespace()}
    inner: Any = SimpleNamespace(models=("head",), needs=(), bring=lambda models: brought)
    assert Watched(inner).bring({}) is brought


def test_nothing_learnt_is_kept_or_shared() -> None:
    lm = tiny.lm()
    one, two = Method(lm, "token-recycling:nodes=4"), Method(lm, "token-recycling:nodes=4")
    one.run([lm.encode(PROMPTS[0])], 6, 0.0, 0)
    assert one.engine.stores
    assert not two.engine.stores
    assert not lm.engine.stores
    one.forget()
    assert not one.engine.stores


def test_a_watched_strategy_is_equal_to_another_one_of_the_same() -> None:
    """So that what requests of one method share is shared, though each notes its own commits."""
    ngram = resolve_method("ngram")[1]
    one = Watched(ngram)
    one.marks.append(CommitMark(0.0, 1, 0, 0, 0.0, 0.0, {}))
    assert one == Watched(ngram) != Watched(resolve_method("suffix")[1])
    assert hash(one) == hash(Watched(ngram))


def test_closing_a_watched_strategy_closes_it() -> None:
    closed = []

    class Endless(Strategy):
        def run(self, ctx: Any) -> Steps:
            try:
                while True:
                    yield Commit([1], torch.zeros(1, 2))
            finally:
                closed.append(True)

    ctx = SimpleNamespace(stats=Stats())
    watched = Watched(Endless())
    steps = watched.run(ctx)
    steps.send(None)
    steps.send(Kept([1], None))
    assert len(watched.marks) == 1
    steps.close()
    assert closed
