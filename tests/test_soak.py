"""scripts/soak.py: its clients against a server with a tiny model, and what it notices."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import foretell
from tests import tiny

pytest.importorskip("fastapi", reason="the server's packages are not installed")

from tests.serve.live import NAME, running, until

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
CONTEXT = 4096  # as in other tests with this model: kept costs depend on it


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))
    import soak

    yield soak
    sys.path[:] = before


def small() -> foretell.LM:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    return foretell.wrap(
        tiny.llama(num_hidden_layers=1, max_position_embeddings=CONTEXT), tokenizer, name="tiny"
    )


def test_clients_find_nothing_wrong_and_notice_what_is(soak: ModuleType) -> None:
    with running(small()) as live:
        tally = asyncio.run(soak.clients(live.url, 6, 1.5, 0, CONTEXT))
        until(lambda: not live.lm.engine.live)  # a client may have left this very moment
        troubles = live.lm.check_integrity()
    assert tally.faults == [] and troubles == []
    assert len(tally.kinds) >= 4 and tally.latest < 2
    lm = small()
    found = soak.compare(lm, tally.greedy, NAME)
    assert found["compared"] and found["different"] == []
    answers = next(iter(tally.greedy.values()))
    answers[0][1].text += "x"
    assert len(soak.compare(lm, tally.greedy, NAME)["different"]) == 1


def test_every_kind_of_request_is_drawn_and_the_same_seed_draws_the_same(soak: ModuleType) -> None:
    from soak_clients import Dice

    asks = [[dice.ask() for _ in range(400)] for dice in (Dice(1, 128), Dice(1, 128))]
    assert asks[0] == asks[1]
    assert {ask.kind for ask in asks[0]} == {
        "greedy",
        "sampled",
        "formed",
        "hurried",
        "leaving",
        "wrong",
        "oversize",
        "too long",
    }


def test_wrong_answers_are_noticed(soak: ModuleType) -> None:
    from soak_clients import DATE, Answer, Ask, found_fault

    ask = Ask("greedy", "completions", {"prompt": "x"})
    assert found_fault(ask, Answer(200), -1.0) == ""
    assert found_fault(ask, Answer(429), -1.0) == ""
    assert "status 500" in found_fault(ask, Answer(500), -1.0)
    assert "status 400, not" in found_fault(ask, Answer(400), -1.0)
    assert "no answer" in found_fault(ask, Answer(None), -1.0)
    assert "after its deadline" in found_fault(ask, Answer(200), 9.0)
    assert "broke off" in found_fault(ask, Answer(200, problem="the stream broke off"), -1.0)
    formed = Ask("formed", "completions", {"structured_outputs": {"regex": DATE}})
    assert found_fault(formed, Answer(200, text="1999-07", finish_reason="stop"), -1.0) == ""
    assert "form" in found_fault(formed, Answer(200, text="x", finish_reason="stop"), -1.0)
    assert found_fault(formed, Answer(200, text="1", finish_reason="length"), -1.0) == ""


def test_what_a_log_has_of_errors_is_told(soak: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("started\na request failed\nTraceback (most recent call last):\n  x\nEnd\n")
    with path.open("rb") as log:
        assert soak.last(log) == "End"
        [error] = soak.tracebacks(log)
    assert error.startswith("a request failed\nTraceback") and error.endswith("End")
