"""The search against a loop of its own over texts that the same draws give, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.rewards.base import Reward
from foretell.strategies.plain import Plain
from foretell.strategies.samples.a_star import AStar
from foretell.testing.toy import Toy
from tests import laws
from tests.strategies.choosing import PROMPT, VOCAB, law_after, write

SPECS = ["a-star:reward=(keywords:words=b),k=2,end=c,longest=3"]
END, STOP = 2, 3  # of a step, of a text


@dataclass(frozen=True)
class Share(Reward):
    """Of a text's letters, how many are `letter`s."""

    letter: str = "b"
    factor: float = 1.0

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [self.factor * text.count(self.letter) / max(1, len(text)) for text in texts]


def sampled(seed: int, **more: Any) -> Sampling:
    options = {"temperature": 1.0, "max_new_tokens": 12, "stop_token_ids": (STOP,), **more}
    return Sampling(seed=seed, **options)


def search(config: AStar, seed: int, most: int) -> tuple[list[int], str, int]:
    """The answer, its reason and how many texts were taken, by a plain list that is scanned."""
    toy = Toy(VOCAB, 0, copy=1.0)
    # (f, 1 - r, -depth, branch, g, text, why it ended)
    open_texts: list[tuple[float, float, int, int, float, list[int], str]] = []
    open_texts.append((1.0, 1.0, 0, 0, 0.0, [], ""))
    branches, drawn, taken = 1, 0, 0

    def step(branch: int, text: list[int], longest: int) -> tuple[list[int], str]:
        rng = Rng(seed, branch)
        new: list[int] = []
        while len(new) < longest:
            law = torch.tensor(law_after(toy, [*text, *new]), dtype=torch.float64).exp()
            new.append(rng.sample(law, "target", len(text) + len(new)))
            if new[-1] == STOP:
                return [*text, *new], "stop"
            if len(text) + len(new) == most:
                return [*text, *new], "length"
            if END in new:
                break
        return [*text, *new], ""

    whole: list[tuple[float, float, int, int, float, list[int], str]] = []
    while True:
        if len(whole) == config.goals or not open_texts:
            best = min(whole, key=lambda one: one[1])
            return best[5], best[6], taken
        best = min(open_texts, key=lambda one: one[:4])
        if best[6]:
            open_texts.remove(best)
            whole.append(best)
            continue
        if config.tokens and drawn >= config.tokens:
            ended = [one for one in [*whole, *open_texts] if one[6]]
            if ended:
                best = max(ended, key=lambda one: (1 - one[1], one[3]))
            return best[5], "budget", taken
        taken += 1
        open_texts.remove(best)
        handles = [best[3], *range(branches, branches + config.k - 1)]
        branches += config.k - 1
        room = config.tokens - drawn if config.tokens else config.k * config.longest
        longest = max(1, min(config.longest, room // config.k))
        seen: list[list[int]] = []
        for handle in handles:
            text, why = step(handle, best[5], longest)
            drawn += len(text) - len(best[5])
            if text in seen:
                continue
            seen.append(text)
            value = laws.spell(text).count("b") / len(text)
            risen = best[4] + max(0.0, value - (1 - best[1]))
            lost = 1 - value
            open_texts.append((risen + lost, lost, best[2] - 1, handle, risen, text, why))


@pytest.mark.parametrize("tokens", [0, 20])
@pytest.mark.parametrize(("k", "goals"), [(2, 1), (3, 1), (2, 3)])
def test_the_answer_is_that_of_a_plain_search(k: int, goals: int, tokens: int) -> None:
    reasons = set()
    longest = 0
    for seed in range(10):
        end = laws.spell([END])
        config = AStar(Share(), k, end=end, longest=4, goals=goals, tokens=tokens)
        live = write(config, sampled(seed))
        text, why, taken = search(config, seed, 12)
        assert live.ctx.branches[live.result].output == text
        assert live.reason == why
        assert list(live.ctx.branches) == [live.result] and not live.caches
        reasons.add(why)
        longest = max(longest, taken)
    assert longest > 2 and ("budget" in reasons) == bool(tokens)


def test_more_goals_bring_a_better_answer_and_cost_more() -> None:
    rewards: dict[int, float] = {}
    opened: dict[int, int] = {}
    for goals in (1, 3):
        config = AStar(Share(), 2, end=laws.spell([END]), longest=4, goals=goals)
        found = [search(config, seed, 12) for seed in range(10)]
        rewards[goals] = sum(laws.spell(text).count("b") / len(text) for text, _, _ in found)
        opened[goals] = sum(taken for _, _, taken in found)
    assert rewards[3] > rewards[1] and opened[3] > opened[1]


def test_ended_from_outside_it_has_a_text() -> None:
    """The request's own branch is there at any time, though the search has given it up."""
    for seed in range(10):
        engine = Engine({"target": Toy(VOCAB, 0, copy=1.0)})
        config = AStar(Share(), 3, end=laws.spell([END]), longest=4, frontier=1)
        live = engine.add(Request(PROMPT, config, sampled(seed), text=laws.spell))
        while engine.live:
            engine.step()
            assert 0 in live.ctx.branches and live.ctx.output is not None
        assert live.error is None


def test_with_a_perfect_reward_no_bad_step_is_ever_continued() -> None:
    """One that knows the answer's beginning opens the way to it alone."""
    asked: list[str] = []

    @dataclass(frozen=True)
    class Knows(Reward):
        answer: str

        def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
            asked.extend(texts)
            return [float(self.answer.startswith(text)) for text in texts]

    config = AStar(Share(), 4, end=laws.spell([END]), longest=3)
    found = 0
    for seed in range(30):
        texts = [write(Plain(), sampled(seed)).ctx.output]
        answer = laws.spell(texts[0])  # branch 0 by itself: the first of the steps, always
        asked.clear()
        live = write(AStar(Knows(answer), 4, end=laws.spell([END]), longest=3), sampled(seed))
        assert laws.spell(live.ctx.branches[live.result].output) == answer
        wrong = [text for text in asked if not answer.startswith(text)]
        assert not any(
            other != text and other.startswith(text) for text in wrong for other in asked
        )
        found += len(wrong)
    assert found > 20 and config.k == 4


def test_few_partial_answers_are_kept() -> None:
    config = AStar(Share(), 4, end=laws.spell([END]), longest=2, frontier=2)
    live = write(config, sampled(3))
    assert live.reason in ("stop", "length") and not live.caches


def test_one_step_at_a_time_is_plain_sampling() -> None:
    for seed in range(6):
        ours = write(AStar(Share(), 1, end=laws.spell([END])), sampled(seed))
        assert ours.ctx.output == write(Plain(), sampled(seed)).ctx.output


def test_other_requests_change_nothing() -> None:
    config = AStar(Share(), 3, end=laws.spell([END]), longest=3)
    for seed in range(3):
        alone, among = write(config, sampled(seed)), write(config, sampled(seed), beside=[config])
        outputs = [live.ctx.branches[live.result].output for live in (alone, among)]
        assert outputs[0] == outputs[1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadConfig, match="a-star: needs a reward"):
        AStar()
    with pytest.raises(Unsupported, match="a-star cannot run on"):
        Engine({"target": Toy(4)}).add(Request([0, 1], AStar(Share()), Sampling()))
    for fields in ({"k": 0}, {"longest": 0}, {"frontier": 0}, {"tokens": -1}, {"end": ""}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            AStar(Share(), **fields)
    engine = Engine({"target": Toy(VOCAB, 0)})
    wide = AStar(Share(factor=9.0), 2, end="c")
    live = engine.add(Request([0, 1], wide, sampled(1), text=laws.spell))
    list(engine.run())
    assert "needs numbers from 0 to 1" in str(live.error)
