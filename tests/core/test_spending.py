"""What a request may spend, on toys: every forward of it is counted by the toys themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.spending import Spending, spending_of
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.rewards.base import Reward
from foretell.spec import resolve_method
from foretell.strategies.samples.a_star import AStar
from foretell.strategies.samples.best_of import BestOf
from foretell.testing.toy import Toy
from tests import laws

SPECS = ["plain", "draft:length=2", "beam:width=3", "diverse-beam", "first-finish", "best-of:n=3"]


class Counted(Toy):
    forwards = 0

    def forward(self, jobs: Any) -> Any:
        self.forwards += 1
        return super().forward(jobs)


def run(method: Any, budget: Spending | None, tokens: int = 40) -> tuple[Any, int]:
    strategy = resolve_method(method)[1] if isinstance(method, str) else method
    target = Counted(8, copy=1.0)
    draft = Counted(8, noise=0.6, copy=1.0, name="draft")
    engine = Engine({"target": target, "draft": draft}, (7,))
    temperature = 0.0 if str(method).startswith(("beam", "diverse")) else 1.0
    options = Sampling(temperature=temperature, max_new_tokens=tokens, logit_bias={7: -1.5})
    live = engine.add(Request([1, 2, 3], strategy, options, text=laws.spell, budget=budget))
    list(engine.run())
    assert live.error is None, live.error
    assert not live.caches and not engine.live
    return live, target.forwards + draft.forwards


@pytest.mark.parametrize("spec", SPECS)
def test_no_more_forwards_than_allowed_and_one_more_changes_nothing_before(spec: str) -> None:
    free, all_forwards = run(spec, None)
    assert free.reason != "budget" and all_forwards > 6
    for allowed in (1, 3, 5):
        live, forwards = run(spec, Spending(forwards=allowed))
        assert live.reason == "budget" and forwards == allowed
        assert sum(live.ctx.stats.calls.values()) == allowed
        assert len(live.ctx.output) <= len(free.ctx.output) or spec != "plain"
    live, forwards = run(spec, Spending(forwards=all_forwards + 1))
    assert (live.ctx.output, live.reason, forwards) == (free.ctx.output, free.reason, all_forwards)


def test_a_text_without_search_stands_where_it_ends() -> None:
    free, _ = run("plain", None)
    for allowed in (2, 5):
        live, _ = run("plain", Spending(forwards=allowed))
        assert live.ctx.output == free.ctx.output[:allowed] and not live.answers


def test_time_counts() -> None:
    live, forwards = run("plain", Spending(seconds=1e-9))
    assert live.reason == "budget" and live.ctx.output == [] and forwards == 0
    assert run("plain", Spending(seconds=1e6))[0].reason != "budget"


class Late(Reward):
    """Later letters are worth more; it counts what it was asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def scores(self, prompt: str, texts: Any) -> list[float]:
        self.seen += texts
        return [sum(map(laws.LETTERS.index, text)) / (26 * len(text) or 1) for text in texts]


def test_best_of_takes_the_best_of_those_that_have_ended() -> None:
    reward = Late()
    for allowed in range(4, 60, 2):
        live, _ = run(BestOf(6, reward), Spending(forwards=allowed))
        whole = [answer for answer in live.answers if answer[2] == "stop"]
        if live.reason != "budget":
            break
        scores = [score for _, score, _ in live.answers]
        assert scores[0] == max(scores) and list(live.ctx.output) == live.answers[0][0]
        assert not whole or len(whole) == len(live.answers), "unfinished ones beside finished ones"
    else:
        raise AssertionError("it never came to its end")
    assert whole


def test_a_star_takes_the_best_that_has_ended_else_the_best_partial_one() -> None:
    kinds = set()
    for allowed in (2, 5, 9, 14, 20, 30, 45, 60, 90, 120):
        reward = Late()
        method = AStar(reward, k=3, end="c", longest=6)
        live, _ = run(method, Spending(forwards=allowed), tokens=8)
        if live.reason != "budget":
            continue
        seen = dict(zip(reward.seen, reward.scores("", reward.seen), strict=True))
        whole = {text for text in seen if text.endswith("h") or len(text) == 8}
        kinds.add(bool(whole))
        answer = laws.spell(live.ctx.output)
        if whole:
            assert answer in whole and seen[answer] == max(seen[text] for text in whole)
        else:
            assert not seen or any(answer.startswith(text) for text in seen)  # and a part of a step
    assert kinds == {True, False}, "one kind of answer was not tested"


def test_without_a_name_for_it_the_likeliest_whole_branch_is_the_answer() -> None:
    """`first-finish` names none: all samples so far stand in the answers, likeliest first."""
    live, _ = run("first-finish", Spending(forwards=5))
    scores = [score for _, score, _ in live.answers]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    assert live.answers[0][0] == live.ctx.output
    toy = Toy(8, copy=1.0)
    for output, score, _ in live.answers:
        text, total = [1, 2, 3], 0.0
        for token in output:
            row = laws.row(toy, text)
            total += row[token] - math.log(sum(map(math.exp, row)))
            text.append(token)
        assert score == pytest.approx(total / len(output), abs=1e-5)


def test_what_limits_are_written_like() -> None:
    assert spending_of(None) is None
    assert spending_of("forwards=20") == Spending(20)
    assert spending_of(" forwards=20, seconds=1.5 ") == Spending(20, 1.5)
    for wrong in ("", "20", "forwards=", "forwards=x", "tokens=3", "forwards=1,forwards=2", 7):
        with pytest.raises(BadConfig, match=r"budget.*forwards=2000,seconds=30"):
            spending_of(wrong)  # type: ignore[arg-type]
    for wrong, why in (
        ("forwards=0", "limits nothing"),
        ("forwards=-1", "above 0"),
        ("seconds=-1", "above 0"),
        ("seconds=nan", "above 0"),
        ("seconds=inf", "above 0"),
    ):
        with pytest.raises(BadConfig, match=why):
            spending_of(wrong)
