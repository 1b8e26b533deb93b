"""What rewards are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from foretell.core.engine import Engine
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.families.toy import Toy
from foretell.ops.rewards import Reward
from foretell.strategies.a_star import AStar
from foretell.strategies.best_of import BestOf
from foretell.strategies.deal import Deal
from foretell.strategies.pg_td import PgTd
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
    with pytest.raises(BadConfig, match=r"unfinished texts .* Whole reads whole ones alone"):
        add(Whole())
