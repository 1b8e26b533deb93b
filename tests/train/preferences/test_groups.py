"""groups.py: advantages and the loss by loops, and the optimum that it leads to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.train.preferences.groups import (
    Group,
    advantages,
    grpo_loss,
    hardest_prompts,
    k2,
    k3,
    mean_rewards,
    parts_of,
    round_prompts,
    transform_rewards,
)

numbers = st.floats(-4, 4, width=32).map(lambda value: round(value, 3))


@given(st.lists(numbers, min_size=2, max_size=6))
def test_advantages_are_rewards_in_deviations_from_the_mean(rewards: list[float]) -> None:
    found = advantages(rewards).tolist()
    spread = statistics.stdev(rewards)
    if max(rewards) == min(rewards):
        assert found == [0.0] * len(rewards)
    else:
        mean = statistics.fmean(rewards)
        wanted = [(reward - mean) / spread for reward in rewards]
        assert found == pytest.approx(wanted, abs=1e-9)
        moved = advantages([2 * reward + 1 for reward in rewards]).tolist()
        assert moved == pytest.approx(found, abs=1e-6)
        centred = advantages(rewards, scale=False).tolist()
        assert centred == pytest.approx([reward - mean for reward in rewards], abs=1e-9)


def test_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    assert advantages([0.1 + 0.2, 0.3, 0.3]).tolist() == [0, 0, 0]
    assert advantages([]).tolist() == [] and advantages([3.0]).tolist() == [0]


def by_loops(
    now: Sequence[Sequence[float]],
    old: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]] | None,
    worth: Sequence[float],
    lengths: Sequence[int],
    kl: str,
) -> list[float]:
    """The paper's equation 3, token by token, with clip .2 and beta .04."""
    found = []
    for row, count in enumerate(lengths):
        total = 0.0
        for place in range(count):
            ratio = math.exp(now[row][place] - old[row][place])
            cut = min(max(ratio, 0.8), 1.2)
            gain = min(ratio * worth[row], cut * worth[row])
            if reference is not None:
                d = reference[row][place] - now[row][place]
                gain -= 0.04 * (math.exp(d) - d - 1 if kl == "k3" else d * d / 2)
            total += gain
        found.append(-total / count)
    return found


rows = st.lists(st.lists(st.floats(-3, 0), min_size=4, max_size=4), min_size=3, max_size=3)


cases = st.tuples(
    rows,
    rows,
    st.none() | rows,
    st.lists(numbers, min_size=3, max_size=3),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.sampled_from(["k2", "k3"]),
)


@given(cases)
def test_the_loss_and_its_gradient_are_those_of_the_paper(case: tuple[Any, ...]) -> None:
    now, old, reference, worth, lengths, kl = case
    leaf = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).double()
    held = None if reference is None else torch.tensor(reference, dtype=torch.float64)
    before, weights = torch.tensor(old, dtype=torch.float64), torch.tensor(worth).double()
    losses = grpo_loss(leaf, before, held, weights, mask, 0.2, 0.04, kl)
    assert losses.tolist() == pytest.approx(by_loops(now, old, reference, worth, lengths, kl))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert not bool((leaf.grad * (1 - mask)).any())
    for row in range(3):
        for place in range(lengths[row]):
            ratio = math.exp(now[row][place] - old[row][place])
            if min(abs(ratio - 0.8), abs(ratio - 1.2)) < 1e-3:
                continue  # at a corner there is no gradient
            ends = []
            for step in (1e-6, -1e-6):
                near = [list(some) for some in now]
                near[row][place] += step
                ends.append(sum(by_loops(near, old, reference, worth, lengths, kl)))
            slope = (ends[0] - ends[1]) / 2e-6
            assert float(leaf.grad[row, place]) == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_slips_would_be_seen() -> None:
    """The comparison with loops tells the objective from ones that are nearly it."""
    torch.manual_seed(2)
    now, old, held = (-torch.rand(3, 4, dtype=torch.float64) for _ in range(3))
    worth = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    lengths = [4, 2, 1]
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).double()
    whole = torch.ones_like(mask)
    wanted = by_loops(now.tolist(), old.tolist(), held.tolist(), worth.tolist(), lengths, "k3")
    right = grpo_loss(now, old, held, worth, mask, 0.2, 0.04, "k3")
    assert right.tolist() == pytest.approx(wanted)
    slips = {
        "not clipped": grpo_loss(now, old, held, worth, mask, 1e9, 0.04, "k3"),
        "ratio upside down": grpo_loss(old, now, held, worth, mask, 0.2, 0.04, "k3"),
        "without the divergence": grpo_loss(now, old, None, worth, mask, 0.2, 0.04, "k3"),
        "divergence the other way": grpo_loss(
            now, old, 2 * now - held, worth, mask, 0.2, 0.04, "k3"
        ),
        "the other estimator": grpo_loss(now, old, held, worth, mask, 0.2, 0.04, "k2"),
        "sign of the reward": grpo_loss(now, old, held, -worth, mask, 0.2, 0.04, "k3"),
        "filled up places count": grpo_loss(now, old, held, worth, whole, 0.2, 0.04, "k3"),
        "mean over all tokens": right * mask.sum(1) / mask.sum() * 3,
    }
    for name, found in slips.items():
        assert found.tolist() != pytest.approx(wanted, rel=1e-4), name


def test_equal_rewards_leave_the_divergence_alone_and_no_beta_nothing() -> None:
    now, old = torch.randn(2, 3), torch.randn(2, 3)
    mask, none = torch.ones(2, 3), torch.zeros(2)
    alone = grpo_loss(now, old, old, none, mask, 0.2, 0.5, "k3")
    assert torch.allclose(alone, 0.5 * k3(old - now).mean(1))
    assert not bool(grpo_loss(now, old, None, none, mask, 0.2, 0.5, "k3").any())


@pytest.mark.parametrize("kl", [k2, k3])
def test_which_divergence_an_estimator_leads_down(kl: Callable[..., torch.Tensor]) -> None:
    """On average over tokens drawn from p the gradient of k2 is that of KL(p || ref), that of k3,
    whose mean is that divergence, is that of KL(ref || p).
    """
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    law = logits.log_softmax(0)
    away = (law.exp() * (law - reference)).sum()
    back = (reference.exp() * (reference - law)).sum()
    loss = (law.detach().exp() * kl(reference - law)).sum()
    if kl is k3:
        assert torch.allclose(loss, away)
    slopes = [torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (away, back, loss)]
    right, wrong = slopes[:2] if kl is k2 else slopes[1::-1]
    assert torch.allclose(slopes[2], right) and not torch.allclose(slopes[2], wrong)


def optimum(values: torch.Tensor, beta: float, kl: str) -> torch.Tensor:
    """Where the loss leads from equal probabilities of so many answers of one token, by its average
    over all of them.
    """
    reference = torch.full_like(values, -math.log(len(values)))
    logits = torch.zeros_like(values, requires_grad=True)
    for _ in range(400):
        now = logits.log_softmax(0)
        chances = now.detach().exp()
        worth = values - (chances * values).sum()
        columns = (now[:, None], now.detach()[:, None], reference[:, None])
        mask = torch.ones_like(values)[:, None]
        losses = grpo_loss(*columns, worth, mask, 0.2, beta, kl)
        (slope,) = torch.autograd.grad((chances * losses).sum(), logits)
        with torch.no_grad():
            logits -= 0.2 / beta * slope / chances.clamp_min(1e-12)
    return logits.detach().softmax(0)


def win_rate(law: torch.Tensor, n: int) -> float:
    """Of the best of n answers by a law against the best of n of equal probabilities, answers in
    ascending order, equal ones half.
    """
    below = torch.cat([torch.zeros(1).double(), law.cumsum(0)]) ** n
    base = torch.linspace(0, 1, len(law) + 1, dtype=torch.float64) ** n
    mine, theirs = below.diff(), base.diff()
    return float((mine * (base[:-1] + base[1:]) / 2).sum() / theirs.sum())


@pytest.mark.parametrize(("t", "rate"), [(2.0, 0.6872), (5.0, 0.8284)])
def test_trained_by_ranks_it_wins_after_best_of_4_as_often_as_theory_says(
    t: float, rate: float
) -> None:
    """InfAlign's optimum by calibrated rewards is the reference's law times exp(C / beta); its best
    of 4 beats the reference's by 1 - ∫ F(u)^4 4 u^3 du, of 400 answers and in the limit.
    """
    rewards = [math.log(1 + number) for number in range(400)]  # of any scale
    ranks = torch.tensor(transform_rewards(rewards, rewards, 0), dtype=torch.float64)
    law = optimum(ranks, 1 / t, "k2")
    assert torch.allclose(law, (t * ranks).softmax(0), rtol=1e-6)
    assert win_rate(law, 4) == pytest.approx(rate, abs=5e-5)
    assert win_rate(torch.full((400,), 1 / 400).double(), 4) == pytest.approx(0.5)


def test_the_other_estimator_has_another_optimum() -> None:
    """By k3 as a loss probabilities become ref / (1 - (A - c) / beta), whose sum is 1 by c."""
    ranks = torch.linspace(0, 1, 20, dtype=torch.float64)
    law = optimum(ranks, 0.5, "k3")
    inverse = 1 / (20 * law)
    slope = (inverse[0] - inverse[-1]) / (ranks[-1] - ranks[0])
    assert torch.allclose(inverse, inverse[0] - slope * ranks, atol=1e-6)
    assert float(slope) == pytest.approx(1 / 0.5, rel=1e-6)
    assert not torch.allclose(law, (2 * ranks).softmax(0), rtol=0.01)


def test_ranks_and_their_transform() -> None:
    known = [1.0, 2.0, 2.0, 5.0]
    assert transform_rewards([0, 1, 2, 3, 9], known, 0) == [0, 0.125, 0.5, 0.75, 1]
    assert transform_rewards([9, 0], known, 10) == pytest.approx([math.exp(10), 1])
    assert transform_rewards([9, 0], known, -10) == pytest.approx([-math.exp(-10), -1])
    once = [math.exp(one) for one in known]  # any rising change of rewards changes nothing
    assert transform_rewards([math.exp(3)], once, 4) == transform_rewards([3], known, 4)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0.01, 1))
def test_the_hardest_are_those_of_the_lowest_bleu(bleus: list[float], share: float) -> None:
    chosen = hardest_prompts(bleus, share)
    assert len(chosen) == max(1, round(share * len(bleus))) and chosen == sorted(chosen)
    rest = [bleus[number] for number in range(len(bleus)) if number not in chosen]
    assert max(bleus[number] for number in chosen) <= min(rest, default=1)


def test_each_pass_has_every_prompt_once_in_another_order() -> None:
    passes = [round_prompts(6, 4, number, 3) for number in range(6)]
    flat = [number for some in passes for number in some]
    orders = [flat[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert [round_prompts(6, 4, number, 4) for number in range(6)] != passes


def test_answers_are_filled_up_behind_and_their_tokens_marked() -> None:
    group = Group((7, 8), [[1, 2, 3], [4], [5, 6]], [1.0, 0.0, 0.5])
    worth = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    first, second = parts_of(group, worth, 2, torch.device("cpu"))
    assert first.ids.tolist() == [[7, 8, 4, 0], [7, 8, 5, 6]]
    assert first.mask.tolist() == [[1, 0], [1, 1]] and first.advantages.tolist() == [-1, 0]
    assert second.ids.tolist() == [[7, 8, 1, 2, 3]] and second.advantages.tolist() == [1]
    assert mean_rewards([group, Group((1,), [], [])]) == {"reward": 0.5, "tokens": 2}
    assert mean_rewards([]) == {}
