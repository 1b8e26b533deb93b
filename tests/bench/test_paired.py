"""Intervals of mean differences."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.bench.paired import bootstrap_interval


def test_it_is_the_means_own_interval() -> None:
    assert bootstrap_interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    values = np.random.default_rng(1).normal(0.3, 2, 400)
    mean, low, high = bootstrap_interval(values.tolist())
    half = 1.96 * values.std() / 20
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.03)
    assert bootstrap_interval(values.tolist()) == (mean, low, high)
