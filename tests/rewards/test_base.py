"""What rewards are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.rewards.base import Mean, Reward
from foretell.rewards.keywords import Keywords
from foretell.rewards.length import Length
from foretell.spec import build_reward
from foretell.strategies.lookahead.deal import Deal
from foretell.strategies.samples.a_star import AStar
from foretell.strategies.samples.best_of import BestOf
from foretell.strategies.search.pg_td import PgTd
from foretell.testing.toy import Toy
from tests import laws
from tests.strategies.choosing import write

SEEN: list[str] = []


@dataclass(frozen=True)
class Listening(Reward):
    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        SEEN.extend(texts)
        return [0.0] * len(texts)


@pytest.mark.parametrize("method", [BestOf(6, Listening()), PgTd(Listening(), rollouts=6, c=30.0)])
def test_a_text_is_read_up_to_what_ended_it(method: BestOf | PgTd) -> None:
    SEEN.clear()
    temperature = 1.0 if isinstance(method, BestOf) else 0.0
    live = write(method, Sampling(temperature=temperature, max_new_tokens=9, stop=("d", "ab")))
    ended = [tokens for tokens, _, reason in live.answers if reason == "stop"]
    assert ended and len(SEEN) == len(live.answers)
    assert not [text for text in SEEN if "d" in text or "ab" in text]
    assert sorted(map(len, SEEN), reverse=True) != sorted(
        (len(tokens) for tokens, _, _ in live.answers), reverse=True
    )


@pytest.mark.parametrize("method", [AStar, Deal])
def test_a_judge_of_whole_texts_is_asked_about_no_unfinished_one(method: Any) -> None:
    class Whole(Listening):
        partial = False

    def add(reward: Reward) -> None:
        request = Request([0, 1], method(reward), Sampling(), text=laws.spell)
        Engine({"target": Toy(4)}).add(request)

    add(Listening())
    with pytest.raises(BadConfig, match=r"unfinished texts .* whole reads whole ones alone"):
        add(Whole())


def test_several_rewards_are_their_mean_by_weight() -> None:
    both = build_reward("keywords:words=return+length:target=4,weight=3")
    assert both == Mean((Keywords("return"), Length(4)), (1.0, 3.0))
    assert both.scores("", ["a b return d", "a b"]) == [1.0, (0 + 3 * 0.5) / 4]
    assert both.partial and not Mean((Keywords("a"), Whole()), (1, 1)).partial
    live = write(BestOf(3, both), Sampling(temperature=1.0, max_new_tokens=5))
    assert len(live.answers) == 3 and all(0 <= score <= 1 for _, score, _ in live.answers)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("keywords:words=C++", "C++"),
        ("keywords:words=salt+pepper", "salt+pepper"),
        ("keywords:words=(salt+length)", "salt+length"),
    ],
)
def test_a_plus_in_a_rewards_own_text_joins_nothing(spec: str, words: str) -> None:
    assert build_reward(spec) == Keywords(words)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("keywords:words=a+lenght:target=5", "unknown reward 'lenght'; did you mean length"),
        ("keywords:words=a+length:target=5,weight=0", "weight=0.0"),
        ("keywords:words=a+length:target=5,weight=x", "length:weight='x'"),
        ("keywords:words=a+length:size=5", "unknown field of length 'size'"),
        ("keywords:words=a,weight=2", "unknown field of keywords 'weight'"),
        ("ngram", "'ngram' is a method, no reward; give it as method='ngram', --method ngram"),
    ],
)
def test_a_sum_of_rewards_that_cannot_be_is_said_in_a_line(spec: str, words: str) -> None:
    with pytest.raises(BadConfig) as error:
        build_reward(spec)
    assert words in str(error.value)


@dataclass(frozen=True)
class Whole(Listening):
    partial = False
