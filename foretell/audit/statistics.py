"""Do these counts of sampled tokens come from these probabilities? Pure functions of arrays.

The test is a goodness-of-fit test of known laws. Samples of one prompt walk down a small tree of
`Position`s: a position is a text after which the next token's probabilities are known, and its
cells are sets of tokens that were merged, before anything was sampled, until each expects enough
samples. The distance of all counts from what they should be is the Freeman-Tukey statistic, the sum
of 4 (sqrt(count) - sqrt(expected))**2 (Freeman and Tukey 1950, Transformations related to the
angular and the square root). Unlike Pearson's it needs no large expected count.

Its null distribution is simulated from the known probabilities themselves, so the p-value
(1 + simulated distances at least as large) / (1 + simulations) is exact whatever the sample sizes
(Barnard 1963; Besag and Clifford 1989, Generalized Monte Carlo significance tests, Biometrika 76).

The power is simulated too, at the sample sizes that are used: each uncertain position's law
over its cells is replaced by one at a given total variation from it, which is among the hardest to
notice. For a total variation d
the noncentrality is n d**2 (1 / p(A) + 1 / (1 - p(A))) where probability is moved evenly into the
set A of cells, and it is smallest where p(A) is a half.
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
    """A text after which the law of the next token is known. Positions follow their parents."""

    law: np.ndarray  # (cells,) probabilities, which sum to 1
    samples: int = 0  # that begin here, at a prompt; 0: those that the parent's cell leads here
    parent: int = -1  # index of the position one token earlier
    cell: int = -1  # of the parent: the token that leads here, alone in its cell


def merge(probabilities: np.ndarray, expected: float) -> list[list[int]]:
    """Tokens, most probable first, in cells that expect enough of `expected` samples.

    `probabilities` (V,). The last cell has whatever is left. One cell: there is nothing to compare.
    """
    cells: list[list[int]] = []
    cell: list[int] = []
    mass = 0.0
    for token in np.argsort(-probabilities, kind="stable").tolist():
        cell.append(token)
        mass += probabilities[token]
        if mass * expected >= LEAST and mass >= SMALLEST:
            cells.append(cell)
            cell = []
            mass = 0.0
    if mass > 0 or not cells:
        cells.append(cell)
    else:
        cells[-1].extend(cell)
    return cells


def uncertain(law: np.ndarray, variation: float) -> bool:
    """Whether the most probable cell leaves so much to the others."""
    return bool(1 - law.max() >= variation - 1e-9)


def simulate(
    positions: Sequence[Position],
    laws: Sequence[np.ndarray],
    rounds: int,
    rng: np.random.Generator,
) -> Simulated:
    """Counts of `rounds` experiments in which the next tokens have these laws."""
    counts: Simulated = []
    for position, law in zip(positions, laws, strict=True):
        if position.parent < 0:
            arrived = np.full(rounds, position.samples)
        else:
            arrived = counts[position.parent][:, position.cell]
        counts.append(rng.multinomial(arrived, law))
    return counts


def distance(positions: Sequence[Position], counts: Sequence[np.ndarray]) -> np.ndarray:
    """The Freeman-Tukey statistic (rounds,) of counts (rounds, cells) at each position."""
    total = np.zeros(len(counts[0]))
    for position, observed in zip(positions, counts, strict=True):
        expected = observed.sum(1, keepdims=True) * position.law
        total += 4 * ((np.sqrt(observed) - np.sqrt(expected)) ** 2).sum(1)
    return total


def null_distances(
    positions: Sequence[Position], rounds: int = SIMULATIONS, seed: int = 0
) -> np.ndarray:
    """Sorted distances (rounds,) of experiments in which the laws are right."""
    rng = np.random.default_rng(seed)
    laws = [position.law for position in positions]
    return np.sort(distance(positions, simulate(positions, laws, rounds, rng)))


def p_values(null: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """The share of `null` (sorted) that is at least as large, the observed one counted too."""
    slack = 1 - 1e-12  # two sums of the same numbers may differ by rounding
    larger = len(null) - np.searchsorted(null, distances * slack, side="left")
    return np.asarray((1 + larger) / (1 + len(null)))


def shifted(law: np.ndarray, variation: float) -> np.ndarray:
    """A law (cells,) at this total variation (at most 0.5) from `law`, among the hardest to notice.

    Probability moves into cells that have at most half of it, in proportion within both sets. A law
    that is not so uncertain is left as it is.
    """
    if not uncertain(law, variation):
        return law
    raised = np.zeros(len(law), dtype=bool)
    share = 0.0
    for cell in np.argsort(-law, kind="stable").tolist():
        if share + law[cell] <= 0.5:
            raised[cell] = True
            share += law[cell]
    return np.where(raised, law * (1 + variation / share), law * (1 - variation / (1 - share)))


def power(
    positions: Sequence[Position],
    null: np.ndarray,
    variation: float,
    level: float,
    change: Callable[[np.ndarray, float], np.ndarray] = shifted,
    seed: int = 1,
) -> float:
    """The share of experiments with a p-value below `level` if uncertain laws are off by
    `variation`.
    """
    rng = np.random.default_rng(seed)
    laws = [change(position.law, variation) for position in positions]
    counts = simulate(positions, laws, POWER_SIMULATIONS, rng)
    return float((p_values(null, distance(positions, counts)) < level).mean())
