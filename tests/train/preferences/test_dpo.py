"""train/preferences/dpo.py: what is minimised, and that a preference is learnt."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from foretell.train.preferences.dpo import TrainDpo
from tests.train.preferences.test_preferences import SETTINGS, trained

PAIRS = (
    torch.tensor([[-9.0, -4.0], [-2.5, -7.0], [-30.0, -31.0]], dtype=torch.float64),
    torch.tensor([[-10.0, -3.0], [-3.0, -3.0], [-31.0, -30.0]], dtype=torch.float64),
    torch.tensor([[3, 2], [4, 4], [10, 7]]),
)


def test_the_loss_is_that_of_the_paper() -> None:
    """Beside the plain formula, and its gradient beside the one that the paper gives."""
    config = TrainDpo(beta=0.3, sft=0.2)
    now, before, counts = PAIRS
    now = now.clone().requires_grad_()
    found = config.loss(now, before, counts)
    (gradient,) = torch.autograd.grad(found.sum(), now)
    for row in range(3):
        better, other = now[row].tolist()
        was_better, was_other = before[row].tolist()
        reward = 0.3 * (better - was_better) - 0.3 * (other - was_other)
        chance = 1 / (1 + math.exp(-reward))
        tokens = int(counts[row, 0])
        wanted = -math.log(chance) - 0.2 * better / tokens
        assert float(found[row].detach()) == pytest.approx(wanted, abs=1e-12)
        weight = 0.3 * (1 - chance)  # the more, the more the rewards are the wrong way round
        assert gradient[row].tolist() == pytest.approx([-weight - 0.2 / tokens, weight], abs=1e-12)


def test_with_nothing_to_tell_apart_it_is_the_loss_of_a_coin() -> None:
    now, before, counts = PAIRS
    coin = torch.full((3,), math.log(2), dtype=torch.float64)
    torch.testing.assert_close(TrainDpo(beta=0.0, sft=0.0).loss(now, before, counts), coin)
    alone = TrainDpo(sft=0.0)
    torch.testing.assert_close(alone.loss(now, now, counts), coin)
    equal = now[:, :1].expand(3, 2)
    torch.testing.assert_close(alone.loss(equal, before[:, :1].expand(3, 2), counts), coin)
    small = TrainDpo(beta=1e-6, sft=0.0).loss(now, before, counts)
    torch.testing.assert_close(small, coin, atol=1e-5, rtol=0)
    assert not torch.allclose(alone.loss(now, before, counts), coin)


def test_the_report_s_numbers_are_shares_of_pairs() -> None:
    now, before, counts = PAIRS
    found = TrainDpo().numbers(now, before, counts)
    gaps = [(1 - -1), (0.5 - -4), (1 - -1)]
    assert float(found["margin"]) == pytest.approx(0.1 * sum(gaps) / 3)
    assert float(found["likelier"]) == pytest.approx(2 / 3) and float(found["preferred"]) == 1


def test_a_preference_is_learnt_and_nothing_was_preferred_before(tmp_path: Path) -> None:
    report = trained(tmp_path, config=dataclasses.replace(SETTINGS, epochs=4), merged="float32")
    assert (report["pairs"], report["held_out"]) == (10, 2)
    before, after = report["before"], report["after"]
    assert before["preferred"] == 0 and before["margin"] == 0
    assert after["preferred"] == 1 and after["margin"] > 0.5 and after["loss"] < before["loss"]
