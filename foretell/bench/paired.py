"""Differences of pairs, with intervals by resampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLED = 10_000


def interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The mean of the differences of pairs, and the percentile interval of the bootstrap around it
    (Efron, 1979); the same for the same numbers.
    """
    values = np.asarray(differences, dtype=np.float64)
    draw = np.random.default_rng(0)
    rows = draw.integers(len(values), size=(RESAMPLED, len(values)))
    low, high = np.quantile(values[rows].mean(1), ((1 - level) / 2, (1 + level) / 2))
    return float(values.mean()), float(low), float(high)
