"""What each method may spend, at which temperature, by which reward, and what is its answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretell.bench.settings import Settings
from foretell.bench.suites.search import methods
from foretell.bench.suites.search.functions import make_functions
from foretell.bench.suites.search.lists import Listing
from foretell.bench.suites.search.methods import answer_task, takes_reward
from foretell.bench.suites.search.sums import Sum
from foretell.bench.suites.search.tasks import Public
from foretell.errors import BadConfig
from tests import tiny

SUM = Sum("added", "3 + 4?", 7)


class Forward:
    def forward(self, jobs: Any) -> list[Any]:
        return []


class Scripted:
    """A model without a chat template; each of its samples takes 10 tokens."""

    tokenizer = None

    def __init__(self, *texts: str, samples: tuple[str, ...] = ()) -> None:
        self.texts, self.samples = texts, samples
        self.models = {"target": Forward()}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def prompt_ids(self, text: str) -> list[int]:
        return [1, 2, 3]

    def generate(self, prompt: Any, method: str, **options: Any) -> Any:
        def out(text: str) -> Any:
            stats = SimpleNamespace(calls={"target": 35})
            return SimpleNamespace(
                text=text, tokens=[0] * 10, stats=stats, finish_reason="stop", samples=[]
            )

        self.asked.append((method, options))
        if isinstance(options.get("seed"), list):
            return [out(self.texts[seed % 1000 % len(self.texts)]) for seed in options["seed"]]
        found = out(self.texts[0])
        found.samples = [out(text) for text in self.samples]
        return found


def _answered(lm: Any, spec: str, task: Any = SUM, **more: Any) -> dict[str, Any]:
    return answer_task(lm, task, spec, Settings(**more), 7)


@pytest.mark.parametrize("spec", ["plain", "adadec", "beam:width=3", "mango", "suffix", "icn"])
def test_what_does_not_draw_is_greedy_and_spends_what_it_takes(spec: str) -> None:
    lm = Scripted("So 7.")
    found = _answered(lm, spec, temperatures=(0.9,))
    ((method, options),) = lm.asked
    assert method == spec and not {"temperature", "seed", "reward"} & options.keys()
    assert options["budget"] is None and options["max_new_tokens"] == 96
    assert (found["score"], found["public"], found["forwards"]) == (1, 0.5, 35)


@pytest.mark.parametrize("spec", ["sampling", "best-of:n=2,inner=suffix", "first-finish", "cntp"])
def test_what_draws_has_the_temperature_and_a_seed_of_the_task(spec: str) -> None:
    lm = Scripted("?")
    _answered(lm, spec, seed=3)
    _answered(lm, spec, temperatures=(0.9,), budget="forwards=50")
    (method, first), (_, second) = lm.asked
    assert method == ("plain" if spec == "sampling" else spec)
    assert (first["temperature"], first["seed"]) == (0.6, (3 * 1_000_003 + 7) * 1000)
    assert (second["temperature"], second["seed"]) == (0.9, 7000)
    assert second["budget"].forwards == 50


def test_a_method_that_names_no_reward_gets_what_is_public() -> None:
    assert [
        takes_reward(spec)
        for spec in ("plain", "suffix", "best-of", "best-of:n=2,reward=bleu", "a-star:k=2", "pg-td")
    ] == [False, False, True, False, True, True]
    lm = Scripted("7", samples=("3 + 4 = 8", "3 + 4 = 7"))
    found = _answered(lm, "best-of:n=2")
    reward = lm.asked[0][1]["reward"]
    assert isinstance(reward, Public) and reward.partial
    assert reward.scores("", ["3 + 4 = 7", "3 + 4 = 8"]) == pytest.approx([2 / 3, 1 / 3])
    assert found["samples"] == [[10, 0], [10, 1]]


def test_a_search_without_an_end_has_a_budget() -> None:
    lm = Scripted("7")
    _answered(lm, "pg-td")
    _answered(lm, "pg-td:rollouts=4", budget="forwards=50,seconds=9")
    (method, first), (other, second) = lm.asked
    assert method == methods.SEARCH and first["budget"].forwards == 200
    assert other == "pg-td:rollouts=4" and second["budget"].seconds == 9


def test_samples_are_drawn_until_all_is_public_or_the_forwards_are_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"bad 7": 0.0, "half": 0.5, "good 7": 1.0}
    monkeypatch.setattr(Sum, "public", lambda self, text: values[text])
    lm = Scripted("bad 7", "half", "good 7", "half")
    found = _answered(lm, "resampling")
    assert found["text"] == "good 7" and found["score"] == 1
    assert (found["forwards"], found["tokens"], len(found["samples"])) == (30, 27, 3)
    assert len(lm.asked) == 1 and lm.asked[0][1]["seed"] == [7000 + n for n in range(8)]
    poor = _answered(lm, "resampling", budget="forwards=25")
    assert poor["text"] == "half" and poor["forwards"] == 20
    one = _answered(lm, "resampling", budget="forwards=5")
    assert one["text"] == "bad 7" and one["forwards"] == 10
    lm = Scripted("bad 7", "half")
    assert len(_answered(lm, "resampling", budget="forwards=99")["samples"]) == 9
    assert len(lm.asked) == 2 and lm.asked[1][1]["seed"][0] == 7008
    with pytest.raises(BadConfig, match="its budget is in forwards"):
        _answered(lm, "resampling", budget="seconds=3")


def test_entries_that_are_found_one_by_one_make_a_list() -> None:
    task = Listing("named", "?", 2, frozenset({"a", "b"}))
    lm = Scripted(" a", samples=(" a", " x", " b"))
    found = _answered(lm, "icn:runs=3,each=1", task)
    assert lm.asked[0][1]["stop"] == ("\n",)
    assert found["text"] == "1. a\n2. x\n3. b"
    assert (found["score"], found["found"]) == (1 / 2, 2)
    assert _answered(lm, "plain", task)["text"] == "1. a"


def test_rewards_of_whole_texts_are_refused_by_name_where_unfinished_ones_are_asked_about() -> None:
    with pytest.raises(BadConfig, match=r"^functions: a-star asks what unfinished texts are worth"):
        answer_task(
            tiny.lm(draft=False), make_functions(1, 0)[0], "a-star", Settings(max_new_tokens=2), 0
        )
