"""The suite `search`: what each way may spend, and how its answers are judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretell.errors import BadConfig
from foretell.measure.bench.settings import Settings
from foretell.measure.programs import programs
from foretell.measure.suites import search
from foretell.measure.suites.search import summary
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
    found = search.answer(lm, task, Settings(), 7)
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


def test_it_runs_on_a_model_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "verdicts", lambda program, tests, limits: [False] * len(tests))
    monkeypatch.setattr(search, "ROLLOUTS", 2)
    settings = Settings(models=("tiny",), max_new_tokens=3)
    tasks = search.prepare([], settings, 2)
    document = search.begin(settings, tasks)
    told: list[tuple[str, int, int]] = []
    saved: list[int] = []
    loaded: list[tuple[str, str]] = []

    def load(model: str, dtype: str) -> Any:
        loaded.append((model, dtype))
        return tiny.lm(draft=False)

    def tell(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    def save(so_far: dict[str, Any]) -> None:
        saved.append(len(so_far["answers"]))

    search.run(settings, tasks, load, document, tell, save)
    assert told == [("tiny", 1, 2), ("tiny", 2, 2)] and saved[-1] == 2
    for task in document["answers"]:
        assert task["samples"] >= 1 and task["forwards"]["pg-td"] >= 3
    ((title, (head, *rows)),) = search.tables(document)
    assert "2 tasks" in title and [row[0] for row in rows] == list(search.WAYS)
    assert all(len(row) == len(head) for row in rows)
    del document["answers"][0]
    search.run(settings, tasks, load, document, tell, save)
    assert len(document["answers"]) == 2 and told[2:] == [("tiny", 1, 2)]
    search.run(settings, tasks, load, document, tell, save)
    assert len(loaded) == 2, "a model was loaded for nothing"


def test_what_it_has_no_use_for_is_refused() -> None:
    with pytest.raises(BadConfig, match="--schemas"):
        search.prepare(["a.json"], Settings(), 0)
    with pytest.raises(BadConfig, match="at least 2 tasks"):
        search.prepare([], Settings(), 1)
    for settings in (
        Settings(methods=("plain",)),
        Settings(rounds=2),
        Settings(requests=(2,)),
        Settings(contexts=(9,)),
    ):
        with pytest.raises(BadConfig, match="--suite search has no use for it"):
            search.begin(settings, [])
    with pytest.raises(BadConfig, match="takes one"):
        search.begin(Settings(temperatures=(0.5, 1.0)), [])
