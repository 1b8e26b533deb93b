"""Conditional beam search against brute force, loops over fresh forwards, and beam search."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.spending import Spending
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, BadFile, RequestFailed, Unsupported
from foretell.rewards.base import Reward
from foretell.strategies.plain import Plain
from foretell.strategies.search import conditional_beam, conditions
from foretell.strategies.search.beam import Beam
from foretell.strategies.search.conditional_beam import ConditionalBeam
from foretell.testing.toy import Toy, ToyRecurrent
from foretell.verification.judge_model import LinearJudge, save_judge
from tests import laws
from tests.strategies.choosing import law_after, write
from tests.strategies.lookahead.test_contrastive import fresh_states

SPECS = ["conditional-beam:exact=yes,least=2", "conditional-beam:reward=(keywords:words=b),width=2"]
OFF = ConditionalBeam(weight=0.0, least=0, grams=0)
STOP, VOCAB = 2, 3
ENDING = Sampling(max_new_tokens=4, stop_token_ids=(STOP,))
JUDGE = LinearJudge(torch.tensor([1.7, -2.3]), torch.tensor(-0.4))


def toy_run(config: Any, seed: int, sampling: Sampling = ENDING, **more: Any) -> Live:
    engine = Engine({"target": Toy(VOCAB, seed, copy=1.0)})
    live = engine.add(Request([0, 1, 2, 0, 1], config, sampling, text=laws.spell, **more))
    list(engine.run())
    if live.error is not None:
        raise live.error
    return live


def every_text(seed: int, length: int) -> dict[tuple[int, ...], float]:
    """All texts that end by STOP or at this length, with their log-probabilities."""
    found = {}
    for size in range(1, length + 1):
        for text in itertools.product(range(VOCAB), repeat=size):
            if STOP in text[:-1] or (size < length and text[-1] != STOP):
                continue
            toy, total = Toy(VOCAB, seed, copy=1.0), 0.0
            for place, token in enumerate(text):
                row = laws.row(toy, [0, 1, 2, 0, 1, *text[:place]])
                total += row[token] - math.log(sum(map(math.exp, row)))
            found[text] = total
    return found


def meets(config: ConditionalBeam, text: Sequence[int]) -> bool:
    own = [token for token in text if token != STOP]
    grams = [tuple(own[i : i + config.grams]) for i in range(len(own) - config.grams + 1)]
    if config.grams and len(set(grams)) < len(grams):
        return False
    right = not config.pattern or re.fullmatch(config.pattern, laws.spell(own))
    return len(own) >= config.least and bool(right)


CONDITIONS: list[dict[str, Any]] = [
    {"least": 1, "grams": 2},
    {"least": 3, "grams": 0},
    {"least": 0, "grams": 1},
    {"least": 1, "grams": 0, "pattern": "(b|ab)+"},
]


@pytest.mark.parametrize("fields", CONDITIONS)
def test_unbounded_it_finds_the_conditional_mode(fields: dict[str, Any]) -> None:
    """By as many beams as there are texts, and depth first."""
    other = 0
    for seed in range(4):
        texts = every_text(seed, 4)
        config = ConditionalBeam(width=81, shortlist=VOCAB, **fields)
        right = {text: total for text, total in texts.items() if meets(config, text)}
        best = max(right, key=lambda text: right[text])
        wide = toy_run(config, seed)
        assert {tuple(tokens) for tokens, _, _ in wide.answers} <= right.keys()
        for live in (wide, toy_run(replace(config, exact=True), seed)):
            assert tuple(live.ctx.output) == best and not live.caches
            assert live.answers[0][1] == pytest.approx(right[best], abs=1e-9)
            assert live.reason == ("stop" if best[-1] == STOP else "length")
        other += best != max(texts, key=lambda text: texts[text])
    assert other, "the likeliest of all texts meets the condition: nothing was tested"


def test_depth_first_leaves_out_what_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ConditionalBeam(exact=True, least=2, grams=2)
    for seed in range(4):
        live = toy_run(config, seed, replace(ENDING, max_new_tokens=6))
        assert live.ctx.stats.calls["target"] < sum(2**depth for depth in range(6))
        with monkeypatch.context() as patch:
            patch.setattr(conditions, "NODES", 3)
            again = toy_run(config, seed, replace(ENDING, max_new_tokens=6))
        assert again.answers == live.answers


@pytest.mark.parametrize("setting", ["plain", "penalties", "grammar", "form, ends"])
def test_switched_off_it_is_beam_search(setting: str) -> None:
    base = laws.SETTINGS[setting]
    sampling = replace(base.sampling, temperature=0.0, max_new_tokens=7, stop_token_ids=(2,))
    for width, penalty in ((4, 0.0), (3, 1.0)):
        for seed in range(3):
            off = toy_run(replace(OFF, width=width, penalty=penalty), seed, sampling)
            beam = toy_run(Beam(width, penalty), seed, sampling)
            assert off.answers == beam.answers and off.ctx.output == beam.ctx.output
            one = toy_run(replace(OFF, width=1), seed, sampling).ctx.output
            assert one == toy_run(Plain(), seed, sampling).ctx.output


@dataclass(frozen=True)
class Even(Reward):
    """The same number for every text."""

    value: float = 0.4

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [self.value] * len(texts)


def test_an_attribute_that_all_texts_have_alike_changes_nothing() -> None:
    for seed in range(4):
        sampling = replace(ENDING, max_new_tokens=8)
        even = toy_run(ConditionalBeam(4, reward=Even(), least=0, grams=0), seed, sampling)
        beam = toy_run(Beam(4, 0.0), seed, sampling)
        assert [tokens for tokens, _, _ in even.answers] == [one for one, _, _ in beam.answers]
        for (_, ours, _), (_, theirs, _) in zip(even.answers, beam.answers, strict=True):
            assert ours == pytest.approx(theirs + math.log(0.4), abs=1e-9)


Chance = Callable[[Toy, list[int]], float]


def by_state(toy: Toy, text: list[int]) -> float:
    x, y = fresh_states(toy, text)[-1]
    return 1 / (1 + math.exp(-(1.7 * x - 2.3 * y - 0.4)))


def by_reward(toy: Toy, text: list[int]) -> float:
    return share(laws.spell(text[5:]))


def share(text: str) -> float:
    return ((1 + text.count("b")) / (2 + len(text))) ** 2


@dataclass(frozen=True)
class Share(Reward):
    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [share(text) for text in texts]


def expected(config: ConditionalBeam, chance: Chance, seed: int, count: int) -> list[int]:
    """The answer by loops; everything is worked out anew."""
    toy = Toy(5, seed, copy=1.0)
    alive: list[tuple[float, float, list[int]]] = [(0.0, 0.0, [])]  # score, log-probability, text
    ended: list[tuple[float, float, list[int]]] = []
    while alive and not (len(ended) == config.width and alive[0][0] <= ended[-1][0]):
        found = []
        for _, total, text in alive:
            law = law_after(toy, text)
            for token in sorted(range(5), key=lambda t: -law[t])[: config.shortlist]:
                new = [*text, token]
                good = math.log(chance(toy, [0, 1, 2, 0, 1, *new]))
                score = total + law[token] + config.weight * good
                found.append((score, total + law[token], new))
        found.sort(key=lambda one: -one[0])
        alive = []
        for rank, one in enumerate(found[: 2 * config.width]):
            if one[2][-1] == 3 or len(one[2]) == count:
                ended += [one] if rank < config.width else []
            elif len(alive) < config.width:
                alive.append(one)
        ended = sorted(ended, key=lambda one: -one[0])[: config.width]
    return ended[0][2]


@pytest.mark.parametrize(
    ("how", "weight"), [("attribute", 1.0), ("attribute", 4.0), ("reward", 4.0)]
)
def test_the_text_is_that_of_plain_loops(how: str, weight: float, tmp_path: Path) -> None:
    save_judge(JUDGE, tmp_path / "judge.safetensors")
    path = str(tmp_path / "judge.safetensors")
    given: dict[str, Any] = {"attribute": path} if how == "attribute" else {"reward": Share()}
    config = ConditionalBeam(3, 4, weight, least=0, grams=0, **given)
    chance = by_state if how == "attribute" else by_reward
    other = 0
    for seed in range(2):
        sampling = Sampling(max_new_tokens=6, stop_token_ids=(3,))
        live = write(config, sampling, seed)
        assert live.ctx.output == expected(config, chance, seed, 6)
        assert live.ctx.stats.calls["target"] <= 1 + 6
        assert list(live.ctx.branches) == [0] and not live.caches
        among = write(config, sampling, seed, beside=[Plain(), config])
        assert among.ctx.output == live.ctx.output
        other += live.ctx.output != write(Beam(3, 0.0), sampling, seed).ctx.output
    assert other


def test_a_judgement_that_is_added_up_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slip: a beam's score keeps what was judged before."""

    def summed(self: Any, laws: Any, wide: int, why: Any, taken: torch.Tensor) -> Any:
        for place, beam in enumerate(self.alive):
            taken[place] -= beam.score - beam.logprob
        return advance(self, laws, wide, why, taken)

    advance = conditional_beam.Group.advance
    monkeypatch.setattr(conditional_beam.Group, "advance", summed)
    with pytest.raises(AssertionError):
        test_the_text_is_that_of_plain_loops("reward", 4.0, tmp_path)


def test_where_the_budget_is_spent_the_best_so_far_is_told() -> None:
    sampling = replace(ENDING, max_new_tokens=6)
    for config in (ConditionalBeam(3, grams=2), ConditionalBeam(exact=True, grams=2)):
        whole, told = toy_run(config, 0, sampling), 0
        for forwards in range(1, whole.ctx.stats.calls["target"]):
            live = toy_run(config, 0, sampling, budget=Spending(forwards=forwards))
            assert live.reason == "budget" and not live.caches
            assert live.ctx.stats.calls["target"] <= forwards
            told += bool(live.ctx.output)
        assert told


def test_conditions_by_hand() -> None:
    grams = conditions.Condition(grams=2)
    assert (
        grams.stays_open((1, 2, 1))
        and not grams.stays_open((1, 2, 1, 2))
        and grams.stays_open((1, 1))
    )
    assert not grams.stays_open((1, 1, 1)) and conditions.Condition().stays_open((1, 1, 1))
    assert not conditions.Condition() and conditions.Condition(least=1)
    least = conditions.Condition(least=2)
    assert least.is_met((0, 1, STOP), (STOP,), laws.spell)
    assert not least.is_met((0, STOP), (STOP,), laws.spell)
    assert not least.is_met((0, 1), (), lambda tokens: " " * len(tokens)), (
        "spaces alone are no text"
    )
    assert least.is_met((0, 1), (), None)
    words = conditions.Condition(pattern="a+")
    cut = lambda tokens: laws.spell(tokens).partition("b")[0]  # noqa: E731
    assert words.is_met((0, 0, 1), (), cut) and not words.is_met((0, 1), (), laws.spell)
    assert grams.label((1, 2, 1, STOP), (STOP,), laws.spell)
    assert not grams.label((1, 1, 1, 0, STOP), (STOP,), laws.spell)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match="none of the texts it found meets the condition"):
        toy_run(ConditionalBeam(pattern="z+"), 0)
    with pytest.raises(RequestFailed, match="none of the texts it found meets the condition"):
        toy_run(ConditionalBeam(pattern="z+", exact=True), 0)
    with pytest.raises(BadConfig, match="conditional-beam cannot honour temperature"):
        toy_run(ConditionalBeam(), 0, Sampling(temperature=0.5))
    with pytest.raises(BadConfig, match="numbers from 0 to 1"):
        toy_run(ConditionalBeam(reward=Even(1.5)), 0)
    with pytest.raises(BadConfig, match="attribute and reward both"):
        ConditionalBeam(attribute="a", reward=Even())
    with pytest.raises(BadConfig, match="leave attribute, reward and penalty out"):
        ConditionalBeam(exact=True, reward=Even())
    with pytest.raises(BadFile, match=r"cannot be read.*foretell train attribute"):
        toy_run(ConditionalBeam(attribute=str(tmp_path / "none")), 0)
    save_judge(replace(JUDGE, norm="another"), tmp_path / "other.safetensors")
    with pytest.raises(BadFile, match="was made for another target than toy"):
        toy_run(ConditionalBeam(attribute=str(tmp_path / "other.safetensors")), 0)
    chains = Engine({"target": ToyRecurrent(4)})
    with pytest.raises(Unsupported, match="'tree'"):
        chains.add(Request([0, 1], ConditionalBeam(exact=True)))
    with pytest.raises(Unsupported, match="needs a tokenizer"):
        chains.add(Request([0, 1], ConditionalBeam(pattern="a")))
    live = chains.add(Request([0, 1], ConditionalBeam(), Sampling(max_new_tokens=5)))
    list(chains.run())
    assert live.error is None, "a condition alone takes no trees"
    bad: list[dict[str, Any]] = [
        {"width": 0},
        {"shortlist": 0},
        {"weight": -1},
        {"penalty": 11},
        {"least": -1},
        {"grams": -1},
        {"pattern": "("},
    ]
    for fields in bad:
        with pytest.raises(BadConfig, match=next(iter(fields))):
            ConditionalBeam(**fields)


@dataclass(frozen=True)
class Late(Reward):
    """0 until a text has two letters b, as keywords are."""

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [float(text.count("b") >= 2) for text in texts]


@dataclass(frozen=True)
class Whole(Late):
    partial = False


def test_a_reward_that_says_nothing_of_a_beginning_finds_a_text_all_the_same() -> None:
    found = 0
    for seed in range(4):
        live = toy_run(ConditionalBeam(4, reward=Late(), grams=0), seed)
        found += laws.spell(live.ctx.output).count("b") >= 2
    assert found >= 3
    with pytest.raises(BadConfig, match="asks what unfinished texts are worth"):
        toy_run(ConditionalBeam(reward=Whole()), 0)
    with pytest.raises(BadConfig, match="floor"):
        ConditionalBeam(reward=Late(), floor=0.0)
