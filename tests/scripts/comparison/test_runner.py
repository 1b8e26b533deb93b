"""Measuring: who runs what in which order, what is noted, who is out."""

from __future__ import annotations

from typing import Any

import pytest
from comparison import runner
from comparison.runner import Settings
from comparison.sides import Contender, Sides

from foretell.bench.peers import Run
from foretell.errors import BadConfig, RequestFailed


class Fake:
    """A process that answers three tokens in two steps; the one called `lame` fails at last."""

    def __init__(self, name: str, log: list[tuple[str, Any]]):
        self.name = name
        self.log = log

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        self.log.append((self.name, tuple(ids[:2])))
        if self.name == "lame" and ids[0] == 2:
            raise RequestFailed("lame: it fell")
        return Run([1, 2, 3], [0.5, 1.5], [1, 2])

    def generation(self, request: dict[str, Any]) -> Run:
        self.log.append((f"{self.name} {request['method']}", tuple(request["ids"][:2])))
        return Run([1, 2, 3], [0.25, 0.75], [1, 2])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.log.append((self.name, next(iter(request))))
        return {"seconds": {"1": 0.1, "2": 0.1, "64": 0.2} if "steps" in request else 0.75}

    def memory(self) -> tuple[int, int]:
        return 1, 2


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    monkeypatch.setattr(runner, "measure_bandwidth", lambda: 1e9)
    monkeypatch.setattr(runner, "PAUSE", 0.0)
    return []


def sides(log: list[tuple[str, Any]]) -> Sides:
    ours: Any = Fake("ours", log)
    peer: Any = Fake("peer", log)
    lame: Any = Fake("lame", log)
    contenders = [
        Contender("ours plain", "", 16, True, ours, "plain"),
        Contender("ours auto", "", 16, False, ours, "auto"),
        Contender("peer", "", 16, True, peer),
        Contender("lame", "", 8, True, lame),
    ]
    return Sides(contenders, {name: {} for name in ("ours", "peer", "lame")})


def test_everybody_runs_every_prompt_and_one_that_fails_is_out(log: list[tuple[str, Any]]) -> None:
    here = sides(log)
    part: dict[str, Any] = {"memory_rate": []}
    rows = runner.measure_set(here, [[1], [2]], Settings(rounds=2), part)
    assert here.absent == {"lame": "lame: it fell"}
    assert part["memory_rate"] == [1e9] * 3
    assert log.count(("ours", "forget")) == 3, "before every round, once a process"
    assert sum(name == "lame" for name, _ in log) == 2, "not asked again"
    assert {row[2] for row in rows} == {1, 2}, "the warm-up is not noted"
    assert len(rows) == 3 * 2 * 2
    by_name = {row[0]: row for row in rows}
    assert by_name["peer"][3:6] == [2.0, 2.0, 0.5]
    assert by_name["ours auto"][3:6] == [4.0, 2.0, 0.25]
    assert len({row[6] for row in rows}) == 1, "the same tokens"
    orders = [name for name, what in log if what in ((1,), (2,)) and name != "lame"]
    assert orders[:3] != orders[6:9] or orders[3:6] != orders[9:12], "shuffled"


def test_long_prompts_are_read_without_drafts_and_begin_differently(
    log: list[tuple[str, Any]],
) -> None:
    here = sides(log)
    texts = [list(range(10, 2000)), list(range(2000, 3200))]
    rows = runner.measure_prefill(here, texts, Settings(rounds=3))
    assert {(row[0], row[1]) for row in rows} == {
        (name, turn) for name in ("ours plain", "peer", "lame") for turn in (1, 2, 3)
    }
    assert {row[2] for row in rows} == {0.25, 0.5}
    assert len({start for _, start in log}) == 4
    with pytest.raises(BadConfig, match="at most 3"):
        runner.measure_prefill(here, texts, Settings(rounds=4))


def test_first_tokens_steps_and_peaks(log: list[tuple[str, Any]]) -> None:
    here = sides(log)
    runner.first_tokens(here, [5])
    seconds = {name: found["first_token_s"] for name, found in here.opened.items()}
    assert seconds == {"ours": 0.75, "peer": 0.5, "lame": 0.5}
    assert log.count(("ours", "first")) == 1
    assert runner.step_costs(here) == {"ours": {"1": 0.1, "2": 0.1}}
    runner.note_peaks(here)
    assert here.opened["peer"]["peak_bytes"] == 2


def test_an_answer_of_one_step_has_no_speed() -> None:
    row = runner.row("a", 0, 1, Run([1], [0.5], [1]))
    assert row[:6] == ["a", 0, 1, 0.0, 0.0, 0.5]
