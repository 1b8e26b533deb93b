"""A model in a process of its own: the same tokens, and a process that ends when it should."""

from __future__ import annotations

import gc

import pytest

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.remote import Remote, model_recipe
from foretell.errors import RequestFailed, Unsupported
from foretell.strategies.parallel.pearl import Pearl
from foretell.testing.toy import Toy
from tests.engine.test_lanes import greedy, models, outputs, requests

RUNS = 100  # 500 of them run in tests/real


def the_remote(engine: Engine) -> Remote:
    """The one of all methods that ran in a process."""
    found = {model for brought in engine.brought.values() for model in brought.values()}
    (remote,) = (model for model in found if isinstance(model, Remote))
    return remote


def test_a_process_gives_the_same_tokens_is_replaced_when_it_dies_and_ends_with_its_engine() -> (
    None
):
    engine = Engine(models(), (7,))
    want = outputs(Engine(models(), (7,)), requests("inline", RUNS))
    assert outputs(engine, requests("process", RUNS)) == want

    plain = greedy(Engine(models(), (7,)), "inline")
    live = greedy(engine, "process")
    assert live.ctx.output == plain.ctx.output
    assert live.ctx.stats.calls == plain.ctx.stats.calls and live.ctx.stats.draft_s > 0
    remote = the_remote(engine)
    assert remote.worker is not None
    process = remote.worker.process
    assert process.poll() is None

    # One that dies says so, and the next request has another.
    unending = Sampling(max_new_tokens=99, ignore_eos=True)
    live = engine.add(Request([1, 2], Pearl(4, "process"), unending))
    while len(live.ctx.output) < 4:
        engine.step()
    process.kill()
    list(engine.run())
    assert isinstance(live.error, RequestFailed)
    assert "the process that computes draft has ended (exit code -9)" in str(live.error)
    assert "lane=inline" in str(live.error)
    assert greedy(engine, "process").ctx.output == plain.ctx.output
    assert remote.worker.process is not process

    process = remote.worker.process
    del engine, remote, live
    gc.collect()
    assert process.poll() == 0, "it outlived its engine"


def test_what_a_process_cannot_make_is_refused_before_anything_runs() -> None:
    class Own(Toy):
        """Of a module that the process does not have."""

    engine = Engine({"target": Toy(8), "draft": Own(8, name="own")})
    with pytest.raises(Unsupported, match=r"lane=process cannot run on own: .* load it with"):
        engine.add(Request([1], Pearl(lane="process"), Sampling()))


def test_a_recipe_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(models())
    broken = {"make": "foretell.testing.toy:Toy", "arguments": {"vocabulary": 8}}
    monkeypatch.setattr(Toy, "recipe", broken)
    live = greedy(engine, "process")
    assert isinstance(live.error, RequestFailed) and "cannot make it: TypeError" in str(live.error)


def test_a_gguf_file_is_made_again_as_it_is() -> None:
    assert model_recipe("a/b.GGUF", dtype="int8")["arguments"] == {"source": "a/b.GGUF"}
    assert model_recipe("a", dtype="int8")["arguments"] == {"source": "a", "dtype": "int8"}
