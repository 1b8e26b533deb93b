"""Do these counts of sampled tokens come from these probabilities? Pure functions of arrays.

The test is a goodness-of-fit test of known distributions. Samples of one prompt walk down a small
tree of `Position`s: a position is a text after which the next token's probabilities are known, and
its cells are sets of tokens that were merged, before anything was sampled, until each expects
enough samples. The distance of all counts from what they should be is the Freeman-Tukey statistic,
the sum of 4 (sqrt(count) - sqrt(expected))**2 (Freeman and Tukey 1950, Transformations related to
the angular and the square root). Unlike Pearson's it needs no large expected count.

Its null distribution is simulated from the known probabilities themselves, so the p-value
(1 + simulated distances at least as large) / (1 + simulations) is exact whatever the sample sizes
(Barnard 1963; Besag and Clifford 1989, Generalized Monte Carlo significance tests, Biometrika 76).

The power is simulated too, at the sample sizes that are used: each uncertain position's
distribution over its cells is replaced by one at a given total variation from it, which is among
the hardest to notice. For a total variation d the noncentrality is n d**2 (1 / p(A) + 1 / (1 -
p(A))) where probability is moved evenly into the set A of cells, and it is smallest where p(A) is a
half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 10.0  # samples expected in a cell, but for a position's last one
SMALLEST = 0.2  # probability of a cell, but for the last one: few cells give the test its power
SIMULATIONS = 9999  # of the null distribution, so that the smallest p-value is 1e-4
POWER_SIMULATIONS = 1000

Simulated = list[np.ndarray]  # counts (rounds, cells) of each position


@dataclass(frozen=True)
class Position:
    """A text after which the distribution of the next token is known. Positions follow their
    parents.
    """

    law: np.ndarray  # (cells,) probabilities, which sum to 1
    samples: int = 0  # that begin here, at a prompt; 0: those that the parent's cell leads here
    parent: int = -1  # index of the position one token earlier
    cell: int = -1  # of the parent: the token that leads here, alone in its cell


def merge_cells(probabilities: np.ndarray, expected: float) -> list[list[int]]:
    """Merges tokens, most probable first, into cells that expect enough of `expected` samples.

    `probabilities` (V,). The last cell has whatever is left. A single cell: there is nothing to
    compare.
    """
    cells: list[list[int]] = []
    cell: list[int] = []
    cell_mass = 0.0
    for token in np.argsort(-probabilities, kind="stable").tolist():
        cell.append(token)
        cell_mass += probabilities[token]
        if cell_mass * expected >= LEAST and cell_mass >= SMALLEST:
            cells.append(cell)
            cell = []
            cell_mass = 0.0
    if cell_mass > 0 or not cells:
        cells.append(cell)
    else:
        cells[-1].extend(cell)
    return cells


def is_uncertain(law: np.ndarray, variation: float) -> bool:
    """Whether the most probable cell leaves so much to the others."""
    return bool(1 - law.max() >= variation - 1e-9)


def simulate_counts(
    positions: Sequence[Position],
    laws: Sequence[np.ndarray],
    rounds: int,
    random_source: np.random.Generator,
) -> Simulated:
    """Simulates the counts of `rounds` experiments in which the next tokens have these
    distributions.
    """
    counts: Simulated = []
    for position, law in zip(positions, laws, strict=True):
        if position.parent < 0:
            arrived_samples = np.full(rounds, position.samples)
        else:
            arrived_samples = counts[position.parent][:, position.cell]
        counts.append(random_source.multinomial(arrived_samples, law))
    return counts


def count_distance(positions: Sequence[Position], counts: Sequence[np.ndarray]) -> np.ndarray:
    """The Freeman-Tukey statistic (rounds,) of counts (rounds, cells) at each position."""
    total_distance = np.zeros(len(counts[0]))
    for position, observed in zip(positions, counts, strict=True):
        expected_counts = observed.sum(1, keepdims=True) * position.law
        total_distance += 4 * ((np.sqrt(observed) - np.sqrt(expected_counts)) ** 2).sum(1)
    return total_distance


def null_distances(
    positions: Sequence[Position], rounds: int = SIMULATIONS, seed: int = 0
) -> np.ndarray:
    """Sorted distances (rounds,) of experiments in which the distributions are right."""
    random_source = np.random.default_rng(seed)
    position_laws = [position.law for position in positions]
    return np.sort(
        count_distance(positions, simulate_counts(positions, position_laws, rounds, random_source))
    )


def p_values(sorted_null: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """The share of `sorted_null` that is at least as large, the observed one counted too."""
    slack = 1 - 1e-12  # two sums of the same numbers may differ by rounding
    larger_count = len(sorted_null) - np.searchsorted(sorted_null, distances * slack, side="left")
    return np.asarray((1 + larger_count) / (1 + len(sorted_null)))


def shift_law(law: np.ndarray, variation: float) -> np.ndarray:
    """Returns a distribution (cells,) at this total variation (at most 0.5) from `law`, among the
    hardest to notice.

    Probability moves into cells that have at most half of it, in proportion within both sets. A
    distribution that is not so uncertain is left as it is.
    """
    if not is_uncertain(law, variation):
        return law
    raised_cells = np.zeros(len(law), dtype=bool)
    raised_share = 0.0
    for cell in np.argsort(-law, kind="stable").tolist():
        if raised_share + law[cell] <= 0.5:
            raised_cells[cell] = True
            raised_share += law[cell]
    return np.where(
        raised_cells,
        law * (1 + variation / raised_share),
        law * (1 - variation / (1 - raised_share)),
    )


def simulate_power(
    positions: Sequence[Position],
    sorted_null: np.ndarray,
    variation: float,
    level: float,
    change_law: Callable[[np.ndarray, float], np.ndarray] = shift_law,
    seed: int = 1,
) -> float:
    """The share of experiments with a p-value below `level` if uncertain distributions are off by
    `variation`.
    """
    random_source = np.random.default_rng(seed)
    changed_laws = [change_law(position.law, variation) for position in positions]
    counts = simulate_counts(positions, changed_laws, POWER_SIMULATIONS, random_source)
    return float((p_values(sorted_null, count_distance(positions, counts)) < level).mean())
