"""Judgements against plain loops over what a scripted judge says with the same draws."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.spending import Spending
from foretell.core.types import Commit, Finish, Sampling, Steps
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.scheduler import FairPlan
from foretell.errors import BadConfig, BadModel, PromptTooLong, Unsupported
from foretell.rewards.base import score_outputs
from foretell.rewards.reward_anything import TIE, RewardAnything
from foretell.spec import build_reward
from foretell.speculation.strategy import Strategy
from foretell.strategies.samples.best_of import BestOf
from foretell.testing.toy import Toy
from tests import laws
from tests.speaking import Speaking, chat, drawn, logits, one_of, spell, tokens_of

PROMPT = tokens_of([("user", "Say b.")])
TEXTS = ["bbb", "ab", "a", "bb", "ab"]
THOUGHTS = {"It is so.</think>": 1.0, "Hm, hm, hm, hm, hm, hm, hm, hm.": 1.0, "No": 0.5}


def asked(question: str) -> dict[str, Any]:
    found = re.search(r"<user>(.*)<end><assistant>", question, re.S)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def script(question: str, written: str) -> Mapping[str, float]:
    """A judge that prefers b, with some noise, and what stands first."""
    if not question.startswith("<system>"):
        return one_of({"a": 1, "ab": 2, "b": 1, "bb": 1}, written)
    document = asked(question)
    assert document["principle"] == "b is good." and document["prompt"] == "Say b."
    texts = document["responses"]
    if "</think>" not in written and "<think>" in written:
        return one_of(THOUGHTS, written.removeprefix("<think>\n"))
    if place := re.search(r'"(model-\d)": $', written):
        good = 1 + texts[place[1]].count("b")
        return {str(points): 3.0 if points == good else 0.7 for points in range(1, 6)}
    assert written.endswith("model-"), "nothing is asked where there is no choice"
    return {str(number): 1.0 + 1.0 / number for number in range(1, 10)}


@dataclass(frozen=True)
class Judge(Strategy):
    """Tells the rewards of TEXTS as scores of answers."""

    reward: Any
    texts: tuple[str, ...] = tuple(TEXTS)
    times: int = 1

    def run(self, ctx: Context) -> Steps:
        self.reward.check(ctx)
        outputs = [list(text.encode()) for text in self.texts]
        for _ in range(self.times):
            found = yield from score_outputs(ctx, self.reward, outputs)
        yield Commit([ord("a")], torch.empty(0))
        answers = [(out, score, "stop") for out, score in zip(outputs, found, strict=True)]
        yield Finish(answers=answers)


def run(
    config: Any, seed: int = 0, model: Any = None, budget: Spending | None = None, **models: Any
) -> Live:
    plan = FairPlan(between_tokens=1e9)  # forwards are counted, so that no time decides them
    engine = Engine({"target": model or Speaking(script), **models}, eos=(0,), plan=plan)
    sampling = Sampling(temperature=1.0, seed=seed, max_new_tokens=6)
    live = engine.add(Request(PROMPT, config, sampling, text=spell, budget=budget))
    list(engine.run())
    if live.error is not None:
        raise live.error
    return live


def reward(**more: Any) -> RewardAnything:
    return RewardAnything(**{"principle": "b is good.", "t": 0.8, "p": 1.0, "think": 20, **more})


def rewards(live: Live) -> list[float]:
    return [score for _, score, _ in live.answers]


def verdict(texts: Sequence[str], rng: Rng, config: RewardAnything) -> tuple[str, list[float]]:
    """What the judge writes of these texts, and their points, character by character."""
    shown = {f"model-{i + 1}": text for i, text in enumerate(texts)}
    question = "<system><end>" + chat(
        [("user", json.dumps({"principle": "b is good.", "prompt": "Say b.", "responses": shown}))]
    )

    def draw(written: str, among: Sequence[str] = ()) -> str:
        row = logits(script(question, written))
        if among:
            row = logits({one: 2.718281828459045 ** row[ord(one)] for one in among})
            row[[i for i in range(128) if chr(i) not in among]] = -math.inf
        token = drawn(row, config.t, rng, len(written))
        return chr(token) if token else ""

    text = ""
    if config.think:
        text = "<think>\n"
        while len(text) < 8 + config.think and "</think>" not in text:
            letter = draw(text)
            if not letter:
                break
            text += letter
        text += "\n" if "</think>" in text else "\n</think>\n"
    text += '{"scores": {'
    points = []
    for i in range(len(texts)):
        text += ", " * (i > 0) + f'"model-{i + 1}": '
        points.append(int(draw(text, "12345")))
        text += str(points[-1])
    text += '}, "best-to-worst": ['
    order: list[int] = []
    while len(order) < len(texts):
        left = [i for i in range(len(texts)) if i not in order]
        best = [i for i in left if points[i] == max(points[j] for j in left)]
        text += ", " * (len(order) > 0) + '"model-'
        names = [str(i + 1) for i in best]
        order.append(int(draw(text, names) if len(names) > 1 else names[0]) - 1)
        text += f'{order[-1] + 1}"'
    written = json.loads(text.rpartition("</think>")[2] + "]}")
    assert list(written["scores"].values()) == points
    ranked = [written["scores"][name] for name in written["best-to-worst"]]
    assert ranked == sorted(points, reverse=True)
    behind = [len(texts) - 1 - order.index(i) for i in range(len(texts))]
    return text, [p + TIE * b / max(1, len(texts) - 1) for p, b in zip(points, behind, strict=True)]


@pytest.mark.parametrize("config", [reward(), reward(think=0), reward(orders=3)])
def test_it_is_the_mean_of_verdicts_in_opposite_orders(config: RewardAnything) -> None:
    different = list(dict.fromkeys(TEXTS))
    values = set()
    for seed in range(3):
        orders: list[list[int]] = []
        for turn in range(0, config.orders, 2):
            order = Rng(seed, 1).gumbel(len(different), 0, turn).argsort().tolist()
            orders += [order, order[::-1]]
        points = dict.fromkeys(different, 0.0)
        for branch, order in enumerate(orders[: config.orders], 2):
            _, found = verdict([different[i] for i in order], Rng(seed, branch), config)
            for i, value in zip(order, found, strict=True):
                points[different[i]] += value / config.orders
        live = run(Judge(config), seed)
        want = [(points[text] - 1) / (4 + TIE) for text in TEXTS]
        assert rewards(live) == pytest.approx(want, abs=1e-12)
        assert all(0 <= value <= 1 for value in want)
        assert live.ctx.stats.notes == {"judgements": config.orders}
        assert list(live.ctx.branches) == [0] and not live.caches
        values.add(tuple(want))
    assert len(values) > 1, "draws are of the request's seed"


def test_a_second_judgement_has_draws_of_its_own() -> None:
    again = [rewards(run(Judge(reward(think=0), times=times))) for times in (1, 2, 3)]
    assert again[0] != again[1] != again[2]


def by_place(question: str, written: str) -> Mapping[str, float]:
    """A judge that likes what stands first, whatever it says."""
    if written.endswith("model-"):
        return {str(number): 10.0**-number for number in range(1, 10)}
    return {"1": 1.0} if re.search(r'"model-[2-9]": $', written) else {"5": 1.0}


def test_a_preference_for_places_cancels_out() -> None:
    model = Speaking(by_place)
    two = ("aa", "b")
    assert rewards(run(Judge(reward(think=0, t=0.0), two), model=model)) == [0.5, 0.5]
    (first, second) = rewards(run(Judge(reward(think=0, t=0.0, orders=1), two), model=model))
    assert abs(first - second) == 1.0


def test_best_of_takes_the_text_of_the_best_verdict() -> None:
    """A judge that only counts letters, without thoughts: the forwards are those of its choices."""

    def sure(question: str, written: str) -> Mapping[str, float]:
        if not question.startswith("<system>"):
            return script(question, written)
        texts = asked(question)["responses"]
        place = re.search(r'"(model-\d)": $', written)
        return {str(1 + texts[place[1]].count("b")): 1.0} if place else {"1": 1.0}

    judge = Speaking(sure)
    many = set()
    for seed in range(4):
        live = run(BestOf(4, reward(think=0, t=0.0)), seed, model=judge)
        texts = [spell(tokens) for tokens, _, _ in live.answers]
        assert texts[0].count("b") == max(text.count("b") for text in texts)
        many.add(len(set(texts)))
        off = run(BestOf(4, reward(orders=0)), seed, model=judge)
        assert {score for _, score, _ in off.answers} == {0.0}
        assert off.ctx.output == run(BestOf(1), seed, model=judge).ctx.output
    assert max(many) > 2
    calls = run(Judge(reward(think=0, t=0.0, orders=1)), model=judge).ctx.stats.calls
    assert calls == {"target": 5}, "one reads the question; four points, no two of them equal"


def test_another_model_may_judge() -> None:
    """One with a tokenizer of its own, whose template has no place for what a system says."""
    shown = []

    def critic(question: str, written: str) -> Mapping[str, float]:
        shown.append(question)
        return by_place(question, written)

    engine = Engine({"target": Toy(5), "critic": Speaking(critic, refuses="system")})
    config = BestOf(3, reward(model="critic", think=0, t=0.0, orders=1))
    sampling = Sampling(temperature=1, max_new_tokens=3)
    live = engine.add(Request([0, 1], config, sampling, text=laws.spell))
    list(engine.run())
    assert live.error is None and live.ctx.stats.calls["critic"] >= 3
    assert live.answers[0][1] == 1.0
    assert all(question.startswith("<user>You compare answers") for question in shown)


def test_a_budget_ends_the_judging_with_a_finished_sample() -> None:
    whole = run(BestOf(3, reward()), 1)
    spent = Spending(forwards=whole.ctx.stats.calls["target"] * 2 // 3)
    live = run(BestOf(3, reward()), 1, budget=spent)
    assert live.reason == "budget" and live.ctx.stats.calls["target"] < spent.forwards + 4
    assert spell(live.ctx.output) in {spell(tokens) for tokens, _, _ in whole.answers}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadConfig, match="needs a principle"):
        build_reward("reward-anything")
    for fields in ({"orders": 9}, {"think": -1}, {"t": -1}, {"p": 0}):
        with pytest.raises(BadConfig, match=f"reward-anything:{next(iter(fields))}"):
            reward(**fields)
    with pytest.raises(Unsupported, match="it needs a 'critic' model; load one"):
        run(BestOf(2, reward(model="critic")))
    with pytest.raises(Unsupported, match="cannot run on toy: it needs a tokenizer that can write"):
        run(BestOf(2, reward()), model=Toy(128))
    with pytest.raises(PromptTooLong, match=r"reward-anything: its question has .* holds .900."):
        run(Judge(reward()), model=Speaking(script, context=900))
    with pytest.raises(BadModel, match="not numbers"):
        run(Judge(reward(think=0)), model=Speaking(lambda question, written: {"1": math.nan}))
