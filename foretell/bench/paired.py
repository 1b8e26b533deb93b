"""Differences of pairs, with intervals by resampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLED = 10_000


def bootstrap_interval(
    differences: Sequence[float], confidence_level: float = 0.95
) -> tuple[float, float, float]:
    """The mean of the differences of pairs, and the percentile interval of the bootstrap around it
    (Efron, 1979); the same for the same numbers.
    """
    values = np.asarray(differences, dtype=np.float64)
    generator = np.random.default_rng(0)
    resampled_rows = generator.integers(len(values), size=(RESAMPLED, len(values)))
    lower_bound, upper_bound = np.quantile(
        values[resampled_rows].mean(1), ((1 - confidence_level) / 2, (1 + confidence_level) / 2)
    )
    return float(values.mean()), float(lower_bound), float(upper_bound)
