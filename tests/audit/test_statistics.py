"""The test of sampled tokens: its level under true laws, its power, and what it catches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretell.audit.auditor import SAMPLES
from foretell.audit.samples import LEVEL, join_positions, plan_positions, sample_seeds
from foretell.audit.statistics import (
    Position,
    count_distance,
    is_uncertain,
    merge_cells,
    null_distances,
    p_values,
    shift_law,
    simulate_counts,
    simulate_power,
)
from foretell.core.distribution import Sampler
from foretell.core.random import Rng
from foretell.core.types import Sampling
from foretell.testing.toy import Toy

PROMPTS = [[1, 2, 3, 1, 2], [4, 4, 0, 1], [5, 3, 5, 3, 5], [0, 1, 2, 3, 4, 5]]
SAMPLING = Sampling(temperature=1.0)
TOY = Toy(12, seed=3, copy=0.5, sharpness=6.0)
DRAFT = Toy(12, seed=3, copy=0.5, sharpness=6.0, noise=0.5)


def law(model: Toy, tokens: list[int]) -> np.ndarray:
    return np.asarray(torch.softmax(model.score(tokens)[0], -1).numpy())


def planned(samples: int) -> list[Position]:
    """The positions after the toy model's prompts."""
    parts = []
    for prompt in PROMPTS:
        parts.append(plan_positions(TOY, prompt, Sampler(SAMPLING, prompt, (), TOY.vocab), samples))
    return join_positions(parts)


def test_true_laws_are_rejected_as_often_as_the_level_says() -> None:
    positions = planned(SAMPLES)
    null = null_distances(positions)
    laws = [position.law for position in positions]
    counts = simulate_counts(positions, laws, 4000, np.random.default_rng(5))
    p = p_values(null, count_distance(positions, counts))
    assert 0.04 < (p < 0.05).mean() < 0.06
    assert (p < LEVEL).mean() < 0.004
    assert 0.45 < p.mean() < 0.55


def test_true_laws_drawn_with_the_engine_s_seeds_are_rejected_as_often_as_the_level_says() -> None:
    """One seed for all prompts would make the same experiment of every prompt."""
    samples = 48
    prompts = 3  # of one law, so that equal seeds would give equal counts
    probabilities = torch.from_numpy(law(TOY, PROMPTS[0]))
    cells = merge_cells(probabilities.numpy(), samples)
    cell_of = {token: i for i, tokens in enumerate(cells) for token in tokens}
    masses = np.array([float(probabilities[tokens].sum()) for tokens in cells])
    positions = [Position(masses, samples)] * prompts
    null = null_distances(positions)
    rejected = 0
    for audit in range(300):
        counts = []
        for prompt in range(prompts):
            count = np.zeros((1, len(cells)), np.int64)
            for seed in sample_seeds(audit * prompts + prompt, samples):
                token = Rng(seed).sample(probabilities, "target", 0)
                count[0, cell_of[token]] += 1
            counts.append(count)
        rejected += bool(p_values(null, count_distance(positions, counts))[0] < 0.05)
    assert 0.03 <= rejected / 300 <= 0.07


def test_no_two_samples_share_a_seed() -> None:
    every = [seed for prompt in range(4) for seed in sample_seeds(prompt, SAMPLES)]
    assert len(set(every)) == len(every) == 4 * SAMPLES and 0 not in every


@pytest.mark.parametrize(("variation", "least"), [(0.14, 0.9), (0.2, 0.99)])
def test_the_power_at_the_verdict_s_own_level(variation: float, least: float) -> None:
    positions = planned(SAMPLES)
    assert simulate_power(positions, null_distances(positions), variation, LEVEL) >= least


def test_few_samples_have_little_power_and_say_so() -> None:
    few = planned(16)
    assert simulate_power(few, null_distances(few), 0.14, LEVEL) < 0.2


def test_the_power_is_that_of_experiments() -> None:
    """What is stated is what repeated experiments with a changed law give."""
    positions = planned(128)
    null = null_distances(positions)
    stated = simulate_power(positions, null, 0.1, LEVEL)
    changed = [shift_law(position.law, 0.1) for position in positions]
    counts = simulate_counts(positions, changed, 2000, np.random.default_rng(9))
    found = (p_values(null, count_distance(positions, counts)) < LEVEL).mean()
    assert abs(found - stated) < 0.05


def without_residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The law of a rule that draws from p, not from what the draft q covered too little."""
    accepted = np.minimum(p, q)
    return np.asarray(accepted + (1 - accepted.sum()) * p)


def test_a_rule_without_residual_is_caught() -> None:
    positions = []
    wrong = []
    for prompt in PROMPTS:
        p = law(TOY, prompt)
        cells = merge_cells(p, SAMPLES)
        biased = without_residual(p, law(DRAFT, prompt))
        positions.append(Position(np.array([p[tokens].sum() for tokens in cells]), SAMPLES))
        wrong.append(np.array([biased[tokens].sum() for tokens in cells]))
    variations = [
        abs(right.law - changed).sum() / 2 for right, changed in zip(positions, wrong, strict=True)
    ]
    assert max(variations) < 0.25, "a coarse mistake would be no proof"
    counts = simulate_counts(positions, wrong, 500, np.random.default_rng(2))
    p_of_runs = p_values(null_distances(positions), count_distance(positions, counts))
    assert (p_of_runs < LEVEL).mean() > 0.95


def test_a_shifted_law_has_the_variation_asked_for() -> None:
    for probabilities in ([0.5, 0.5], [0.9, 0.1], [0.4, 0.3, 0.2, 0.1], [0.85, 0.1, 0.05]):
        right = np.array(probabilities)
        changed = shift_law(right, 0.1)
        assert changed.min() >= 0 and changed.sum() == pytest.approx(1)
        assert abs(changed - right).sum() / 2 == pytest.approx(0.1)
    certain = np.array([0.97, 0.03])
    assert not is_uncertain(certain, 0.1) and (shift_law(certain, 0.1) == certain).all()


def test_cells_are_merged_before_anything_is_sampled() -> None:
    probabilities = np.array([0.02, 0.5, 0.2, 0.08, 0.17, 0.03])
    assert merge_cells(probabilities, 256) == [[1], [2], [4, 3], [5, 0]]
    assert merge_cells(probabilities, 16) == [[1, 2], [4, 3, 5, 0]]
    assert merge_cells(np.array([0.0, 1.0]), 256) == [[1, 0]]
    assert merge_cells(np.array([1e-6, 1 - 1e-6]), 256) == [[1], [0]]
    for expected in (1, 50, 1000):
        flat = merge_cells(np.full(400, 1 / 400), expected)
        assert sorted(token for cell in flat for token in cell) == list(range(400))


def test_counts_that_fit_exactly_have_the_largest_p() -> None:
    positions = [Position(np.array([0.5, 0.25, 0.25]), 64)]
    null = null_distances(positions, 999)
    assert p_values(null, count_distance(positions, [np.array([[32, 16, 16]])]))[0] == 1
    assert p_values(null, count_distance(positions, [np.array([[64, 0, 0]])]))[0] == 1 / 1000
