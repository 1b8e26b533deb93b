"""Best of n against the samples that the same draws give one by one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.lookup.ngram import Ngram
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.strategies.plain import Plain
from foretell.strategies.samples.best_of import BestOf, rank_share
from foretell.testing.toy import Toy
from tests import laws
from tests.strategies.choosing import PROMPT, VOCAB, Count, words, write

SPECS = ["best-of:n=3,reward=(keywords:words=b)", "best-of:n=2,references=2,soft=yes,inner=ngram"]


def sampled(seed: int) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, max_new_tokens=9, stop_token_ids=(3,))


def samples(seed: int, count: int) -> list[list[int]]:
    """Each by itself: its draws are its branch's own."""
    found = []
    for branch in range(count):
        engine = Engine({"target": Toy(VOCAB, 0, copy=1.0)})
        request = Request(PROMPT, Plain(), sampled(seed), rng=Rng(seed, branch))
        live = engine.add(request)
        list(engine.run())
        found.append(list(live.ctx.output))
    return found


@pytest.mark.parametrize("inner", [None, Ngram()])
def test_the_answer_is_the_sample_of_the_highest_reward(inner: Any) -> None:
    other = 0
    for seed in range(12):
        texts = samples(seed, 4)
        values = [Count().score(laws.spell(text)) for text in texts]
        live = write(BestOf(4, Count(), inner=inner), sampled(seed))
        best = values.index(max(values))
        assert live.ctx.branches[live.result].output == texts[best]
        told = [(tokens, score) for tokens, score, _ in live.answers]
        assert told[0] == (texts[best], values[best])
        assert sorted(told) == sorted(zip(texts, values, strict=True))
        assert list(live.ctx.branches) == [live.result] and not live.caches
        other += best != 0
    assert other > 3


def test_ranks_among_references_decide_as_rewards_do_and_softly_by_chance() -> None:
    chosen = set()
    for seed in range(12):
        texts = samples(seed, 9)
        values = [Count().score(laws.spell(text)) for text in texts]
        ranks = [rank_share(value, sorted(values[3:])) for value in values[:3]]
        live = write(BestOf(3, Count(), references=6), sampled(seed))
        assert live.answers[0][1] == max(ranks)
        soft = write(BestOf(3, Count(), references=6, soft=True, t=2.0), sampled(seed))
        weights = torch.tensor([2.0 * value for value in ranks], dtype=torch.float64).softmax(0)
        place = Rng(seed).sample(weights, "draft", 0)
        assert soft.ctx.branches[soft.result].output == texts[place]
        chosen.add(place == ranks.index(max(ranks)))
    assert chosen == {True, False}, "a soft choice is not always the best, and not never"


@pytest.mark.parametrize(("t", "one", "four"), [(2.0, 0.6565, 0.6872), (5.0, 0.8068, 0.8284)])
def test_soft_choices_among_many_win_as_the_tilted_law_does(
    t: float, one: float, four: float
) -> None:
    """Source: InfAlign, arXiv:2412.19792: the law that best-of-n serves best is exp(t rank) times
    the model's own. Its answer, and the best of four, against as many of the model's own.
    """
    count = 2_000
    seen: list[torch.Tensor] = []

    def sample(law: torch.Tensor, purpose: str, place: int) -> int:
        seen.append(law)
        return 0

    ctx: Any = SimpleNamespace(rng=SimpleNamespace(sample=sample))
    rewards = [math.exp(0.01 * place) for place in range(count)]  # of any range
    BestOf(4, Count(), references=1, soft=True, t=t).choose_sample(
        ctx, [rank_share(r, rewards) for r in rewards]
    )
    (law,) = seen

    def wins(n: int) -> float:
        """The probability that the best of n of this law is above that of n of the even one."""
        ours = torch.cat([law.new_zeros(1), law.cumsum(0)]) ** n
        theirs = torch.linspace(0, 1, count + 1, dtype=torch.float64) ** n
        return float((ours.diff() * (theirs[1:] + theirs[:-1]) / 2).sum())

    assert wins(1) == pytest.approx(one, abs=1e-4) and wins(4) == pytest.approx(four, abs=1e-4)


def test_a_rank_counts_ties_by_half() -> None:
    assert rank_share(2.0, [1.0, 2.0, 2.0, 3.0]) == 0.5
    assert rank_share(0.0, [1.0, 2.0]) == 0.0 and rank_share(9.0, [1.0, 2.0]) == 1.0


def test_samples_without_a_number_are_left_out() -> None:
    for seed in range(6):
        texts = samples(seed, 4)
        live = write(BestOf(4, Count(bad="b")), sampled(seed))
        good = [text for text in texts if 1 not in text]
        answer = live.ctx.branches[live.result].output
        want = max(good, key=lambda text: -len(text)) if good else texts[0]
        assert answer == want
        assert sum(score == -math.inf for _, score, _ in live.answers) == 4 - len(good)


def test_one_sample_is_plain_sampling() -> None:
    for seed in range(6):
        assert write(BestOf(1), sampled(seed)).ctx.output == samples(seed, 1)[0]


def test_other_requests_change_nothing() -> None:
    for seed in range(4):
        alone = write(BestOf(3, Count()), sampled(seed))
        among = write(BestOf(3, Count()), sampled(seed), beside=[Plain(), BestOf(2)])
        assert alone.answers == among.answers


def test_without_a_reward_the_text_of_most_agreement_is_the_answer() -> None:
    live = write(BestOf(5), sampled(3), text=words)
    scores = [score for _, score, _ in live.answers]
    assert scores[0] == max(scores) and len(set(scores)) > 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"best-of cannot run on .*: it needs a tokenizer"):
        Engine({"target": Toy(4)}).add(Request([0, 1], BestOf(), Sampling()))
    for fields in ({"n": 0}, {"references": 9999}, {"t": 1e9}, {"soft": True}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            BestOf(**fields)
