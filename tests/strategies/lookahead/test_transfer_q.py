"""Values of a baseline's continuations, against loops over both toys' rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.rewards.base import Reward
from foretell.strategies.lookahead.deal import Deal
from foretell.strategies.lookahead.transfer_q import TransferQ, transfer_value
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.strategies.choosing import VOCAB, Count, law_after, write

SPECS = ["transfer-q:reward=(keywords:words=b),k=2,ahead=2"]


def expected(config: TransferQ, baseline: Toy, seed: int, count: int) -> list[int]:
    toy = Toy(VOCAB, seed, copy=1.0)
    output: list[int] = []
    ahead = config.ahead or (5 if config.own else 20)
    while len(output) < count:
        law = law_after(toy, output)
        scores = []
        order = sorted(range(VOCAB), key=lambda token: -law[token])[: config.k]
        for token in order:
            path = [token]
            for _ in range(min(ahead, count - len(output) - 1)):
                below = law_after(baseline, [*output, *path])
                path.append(max(range(VOCAB), key=lambda token: below[token]))
            text = laws.spell([*output, *path])
            value = Count().score(text)
            if config.own is not None:
                value *= math.exp(0.5 * (value - Count("c").score(text)))
            scores.append(law[token] + config.weight * value)
        output.append(order[scores.index(max(scores))])
    return output


@pytest.mark.parametrize("own", [None, Count("c")])
@pytest.mark.parametrize("ahead", [0, 3])
def test_the_text_is_that_of_plain_loops(own: Reward | None, ahead: int) -> None:
    other = 0
    for seed in range(4):
        baseline = Toy(VOCAB, seed, noise=1.0, copy=1.0, name="aligned")
        config = TransferQ(Count(), own, "aligned", k=3, ahead=ahead)
        live = write(config, Sampling(max_new_tokens=9), seed, aligned=baseline)
        assert live.ctx.output == expected(config, baseline, seed, 9)
        alone = TransferQ(Count(), own, k=3, ahead=ahead)
        other += live.ctx.output != write(alone, Sampling(max_new_tokens=9), seed).ctx.output
    assert other, "the baseline's texts count, not the target's"


def test_with_the_target_as_its_own_baseline_it_looks_ahead_as_deal_does() -> None:
    for seed in range(4):
        ours = write(TransferQ(Count(), k=3, ahead=4), Sampling(max_new_tokens=9), seed)
        deal = write(Deal(Count(), 3, 4), Sampling(max_new_tokens=9), seed)
        assert ours.ctx.output == deal.ctx.output


@dataclass(frozen=True)
class Clean(Reward):
    """Whether no `c` stands in a text."""

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        return [float("c" not in text) for text in texts]


class Aligned(Toy):
    """A toy that writes no `c`."""

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        logits = super().row(tokens, positions)
        logits[2] -= 8.0
        return logits


def test_an_aligned_models_continuations_are_worth_more_than_the_targets_own() -> None:
    """The target spoils most texts sooner or later, so that its own tell no token from another."""
    clean = {"": 0.0, "aligned": 0.0}
    for seed in range(12):
        aligned = Aligned(VOCAB, seed, copy=1.0, name="aligned")
        for name in clean:
            config = TransferQ(Clean(), baseline=name, k=3, ahead=12, weight=4.0)
            live = write(config, Sampling(max_new_tokens=12), seed, aligned=aligned)
            clean[name] += 2 not in live.ctx.output
    assert clean["aligned"] == 12 and clean[""] < 9, clean


def test_the_same_reward_on_both_sides_is_direct_transfer() -> None:
    assert transfer_value(1.7, 1.7) == 1.7 and transfer_value(-math.inf, 1.0) == -math.inf
    for seed in range(3):
        same = TransferQ(Count(), Count(), k=3, ahead=4)
        direct = TransferQ(Count(), k=3, ahead=4)
        texts = [write(one, Sampling(max_new_tokens=8), seed).ctx.output for one in (same, direct)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("fields", [{"weight": 0.0}, {"k": 1}])
def test_without_weight_or_choice_it_is_greedy_decoding(fields: dict[str, float]) -> None:
    live = write(TransferQ(Count(), **fields), Sampling(max_new_tokens=8))  # type: ignore[arg-type]
    assert live.ctx.output == write(Plain(), Sampling(max_new_tokens=8)).ctx.output


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadConfig, match="transfer-q: needs a reward"):
        TransferQ()
    for fields in ({"k": 0}, {"ahead": 999}, {"weight": -1}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            TransferQ(Count(), **fields)


@dataclass(frozen=True)
class Whole(Count):
    partial = False


@pytest.mark.parametrize("rewards", [{"reward": Whole()}, {"reward": Count(), "own": Whole()}])
def test_rewards_of_whole_texts_are_refused(rewards: dict[str, Reward]) -> None:
    with pytest.raises(BadConfig, match="transfer-q asks what unfinished texts are worth"):
        write(TransferQ(**rewards), Sampling(max_new_tokens=8))
