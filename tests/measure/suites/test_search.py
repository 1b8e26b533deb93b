"""The suite `search`: what each way may spend, and how its answers are judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretell.errors import BadConfig
from foretell.measure.programs import programs
from foretell.measure.suites import search
from foretell.measure.suites.search import Settings, summary
from tests import tiny

GOOD, BAD = "\n    return 3 * x - 5", "\n    return x"


class Scripted:
    """A model without a chat template whose samples take 10 tokens each; pg-td takes 35."""

    tokenizer = None
    models = {"target": SimpleNamespace(name="scripted")}  # noqa: RUF012

    def __init__(self, samples: list[str], searched: str) -> None:
        self.samples, self.searched = samples, searched
        self.seeds: list[int] = []

    def prompt_ids(self, text: str) -> list[int]:
        return [1, 2, 3]

    def generate(self, prompt: Any, method: Any, **options: Any) -> Any:
        def out(text: str, forwards: int) -> Any:
            stats = SimpleNamespace(calls={"target": forwards})
            return SimpleNamespace(text=text, tokens=[0] * forwards, stats=stats, samples=[])

        if method != "plain":
            return out(self.searched, 35)
        if isinstance(options.get("seed"), list):
            self.seeds += options["seed"]
            return [
                out(self.samples[seed % 1000 % len(self.samples)], 10) for seed in options["seed"]
            ]
        return out(BAD, 10)


def test_samples_are_paid_for_by_what_the_search_computed() -> None:
    (task,) = [one for one in programs(15, 0) if one.kind == "linear"]
    a, b = [word for word in task.says.strip(".").split() if word.isdigit()]
    good = f"\n    return {a} * x - {b}"
    lm: Any = Scripted([BAD, "\n   no Python", good, BAD, good], good)
    found = search.answer(lm, task, Settings(items=2), 7)
    assert found["samples"] == 3  # 30 of 35 forwards: a fourth would be beyond them
    assert found["forwards"] == {"plain": 10, "sampling": 10, "best-of": 30, "pg-td": 35}
    assert found["hidden"] == {"plain": 0, "sampling": 0, "best-of": 1, "pg-td": 1}
    assert found["public"]["best-of"] == 1 and found["programs"]["pg-td"] == task.head + good
    assert lm.seeds == [7000 + n for n in range(8)]


def test_the_summary_is_of_pairs() -> None:
    def one(plain: float, searched: float) -> dict[str, Any]:
        shares = {"plain": plain, "sampling": 0.5, "best-of": searched, "pg-td": searched}
        return {"hidden": shares, "public": shares, "forwards": dict.fromkeys(shares, 4)}

    found = summary([one(1, 1), one(0, 1), one(0, 0), one(0.8, 1)])
    assert found["plain"]["solved"] == 0.25 and found["pg-td"]["solved"] == 0.75
    assert found["plain"]["hidden"] == 0.45 and found["sampling"]["solved"] == 0
    more = found["plain"]["pg_td_more"]
    assert more["mean"] == 0.5 and 0 <= more["low"] < 0.5 < more["high"] <= 1
    assert found["best-of"]["pg_td_more"] == {"mean": 0, "low": 0, "high": 0}


def test_it_runs_on_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "verdicts", lambda program, tests, limits: [False] * len(tests))
    lm = tiny.lm(draft=False)
    told: list[tuple[int, int]] = []
    settings = Settings(items=2, rollouts=2, max_new_tokens=3)
    document = search.run(lm, settings, lambda *done: told.append(done))
    assert told == [(0, 2), (1, 2), (2, 2)] and len(document["tasks"]) == 2
    for task in document["tasks"]:
        assert task["samples"] >= 1 and task["forwards"]["pg-td"] >= 3
    title, head, rows = search.shown(document)
    assert "2 tasks" in title and [row[0] for row in rows] == list(search.WAYS)
    assert all(len(row) == len(head) for row in rows)


def test_settings_have_ranges() -> None:
    for field, value in (("items", 1), ("rollouts", 0), ("max_new_tokens", 0), ("temperature", 0)):
        with pytest.raises(BadConfig, match=f"{field}="):
            Settings(**{field: value})
