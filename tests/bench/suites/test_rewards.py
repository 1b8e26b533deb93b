"""The suite `rewards`: its tasks, how answers are compared, and a run on a tiny model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretell.bench.settings import Settings
from foretell.bench.suites import rewards
from foretell.bench.suites.rewards import Task, prepare
from foretell.errors import BadConfig, UnknownMethod
from foretell.rewards.keywords import Keywords
from tests import tiny

LENGTH = "length:target=2"


def test_pairs_are_short_answers_and_long_texts_about_something_else() -> None:
    tasks = prepare([], Settings(rewards=(LENGTH,)))
    pairs = [task for task in tasks if task.part == "pairs"]
    assert len(pairs) == 40
    for task in pairs:
        assert 3 * len(task.short.split()) < len(task.long.split())
        asked = {word.strip("?,.").lower() for word in task.question.split() if len(word) > 4}
        said = {word.strip("?,.:;").lower() for word in task.short.split()}
        assert any(word[:4] == other[:4] for word in asked for other in said), task.question
    assert not any(task.part == "pairs" for task in prepare([], Settings())), "no reward to ask"


def test_sentences_ask_for_keywords_that_the_reward_knows() -> None:
    tasks = [task for task in prepare([], Settings(), 9) if task.part == "words"]
    assert len(tasks) == 9 and len(set(tasks)) == 9
    assert tasks == [task for task in prepare([], Settings(), 9) if task.part == "words"]
    for task in tasks:
        assert Keywords(task.words).scores("", [task.question, ""]) == [1.0, 0.0]
        plural = " ".join(forms.split("|")[-1] for forms in task.words.split())
        assert Keywords(task.words).scores("", [plural]) == [1.0]


class Scripted:
    """A model that writes given texts: plain ones, and those of best-of."""

    tokenizer = None

    def __init__(self, singles: list[str], chosen: dict[str, str]) -> None:
        self.singles, self.chosen = singles, chosen
        self.seeds: list[Any] = []

    def prompt_ids(self, prompt: Any) -> list[int]:
        return [1]

    def generate(self, prompt: Any, method: str, **options: Any) -> Any:
        self.seeds.append(options["seed"])
        if method == "plain":
            return [SimpleNamespace(text=text, error=None) for text in self.singles]
        assert method.startswith("best-of:n=4,references=16,soft=")
        return SimpleNamespace(text=self.chosen["yes" if "soft=yes,t=10" in method else "no"])


def test_wins_are_shares_of_samples_and_ties_count_by_half() -> None:
    lm: Any = Scripted(["a", "a b", "a b", "a b c d e"] * 2, {"no": "b a", "yes": "c"})
    settings = Settings(rewards=(LENGTH,), seed=3)
    found = rewards.compare_samples(lm, Task("samples", "?"), settings, 7)
    assert found["wins"] == {"hard": 0.75, "soft": 0.375}
    plain, hard, soft = lm.seeds
    assert hard == soft and len(set(plain)) == 8 and hard not in plain, "draws of their own"
    answers = [{"part": "samples", **found}, {"part": "samples", "wins": {"hard": 1, "soft": 0.5}}]
    summed = rewards.summarise_parts(answers)["samples"]
    assert summed["hard"]["wins"] == 0.875 and summed["hard"]["more"]["mean"] == 0.375
    assert summed["soft"]["more"]["low"] < 0 < summed["hard"]["more"]["low"]


def test_each_reward_is_asked_about_both_texts() -> None:
    task = Task("pairs", "?", "one two", "one two three four")
    lm: Any = None
    settings = Settings(rewards=(LENGTH, "length:target=4"))
    answer = rewards.score_pair(lm, task, settings, 0)
    assert answer["scores"] == {LENGTH: [1.0, 0.0], "length:target=4": [0.5, 1.0]}
    even = {"part": "pairs", "scores": {LENGTH: [0.5, 0.5], "length:target=4": [0.5, 0.5]}}
    found = rewards.summarise_parts([{"part": "pairs", **answer}, even])["pairs"]
    assert found[LENGTH] == {"pairs": 2, "right": 1} and found["length:target=4"]["right"] == 0


def test_it_runs_on_a_model_with_an_aligned_one_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "REFERENCES", 2)
    monkeypatch.setattr(rewards, "ASKED", "{words}")
    settings = Settings(models=("tiny",), draft="aligned", rewards=(LENGTH,), max_new_tokens=4)
    tasks = [task for task in prepare([], settings, 1) if len(task.question) < 90]
    assert [task.part for task in tasks] == ["pairs", "words", "samples"]
    document = rewards.begin(settings, tasks)
    rewards.run(settings, tasks, lambda *_: tiny.lm(), document)
    assert not rewards.failures(document)
    (cell,) = document["cells"]
    ways = cell["words"]
    assert list(ways) == ["prompt alone", "deal", "transfer-q", "transfer-q, rolling out the draft"]
    assert ways["prompt alone"]["forwards"] <= 4 < ways["deal"]["forwards"]
    assert set(ways["transfer-q, rolling out the draft"]["aligned"]) == {"mean", "low", "high"}
    shown = rewards.tables(document)
    assert [title.partition(",")[0] for title, _ in shown] == ["pairs", "words", "samples"]
    assert all(len(row) == len(rows[0]) for _, rows in shown for row in rows)
    alone = Settings(models=("tiny",), max_new_tokens=4)
    answer = rewards.cover_keywords(tiny.lm(), tasks[1], alone, 0)
    assert list(answer["coverage"]) == ["prompt alone", "deal", "transfer-q"]


def test_what_it_has_no_use_for_is_refused() -> None:
    with pytest.raises(BadConfig, match="--methods: --suite rewards has no use for it"):
        rewards.begin(Settings(methods=("plain",)), [])
    with pytest.raises((BadConfig, UnknownMethod), match="nothing"):
        rewards.begin(Settings(rewards=("nothing",)), [])
    with pytest.raises(BadConfig, match="needs an encoder"):
        rewards.begin(Settings(rewards=("r3",)), [])
