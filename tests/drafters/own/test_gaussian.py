"""The Gaussian process beside the formulas of textbooks."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.drafters.own.gaussian import Surrogate, matern_kernel


def test_mean_and_deviation_are_those_of_the_formulas() -> None:
    draw = np.random.default_rng(1)
    points, values, others = draw.random((9, 4)), draw.random(9), draw.random((5, 4))
    process = Surrogate(points, values, noise=0.05)
    inverse = np.linalg.inv(matern_kernel(points, points, process.length) + 0.05 * np.eye(9))
    cross = matern_kernel(others, points, process.length)
    mean = values.mean() + cross @ inverse @ (values - values.mean())
    deviation = values.std() * np.sqrt(1 - np.einsum("ij,jk,ik->i", cross, inverse, cross))
    assert process.upper_bounds(others, 0.0) == pytest.approx(mean)
    assert process.upper_bounds(others, 2.5) == pytest.approx(mean + 2.5 * deviation)


def test_the_kernel_is_one_at_no_distance_and_fades() -> None:
    line = np.linspace(0, 1, 5)[:, None]
    values = matern_kernel(line, line[:1], 0.5)[:, 0]
    assert values[0] == pytest.approx(1) and (np.diff(values) < 0).all()
    z = 5**0.5 * 0.25 / 0.5
    assert values[1] == pytest.approx((1 + z + z * z / 3) * np.exp(-z))


def test_it_finds_what_a_few_coordinates_decide() -> None:
    draw = np.random.default_rng(2)
    weights = np.linspace(-1, 1, 8)
    points = (draw.random((40, 8)) > 0.5).astype(float)
    others = (draw.random((200, 8)) > 0.5).astype(float)
    process = Surrogate(points, points @ weights)
    found = others[process.upper_bounds(others, 0.5).argmax()] @ weights
    assert found >= np.quantile(others @ weights, 0.95)


def test_equal_values_are_no_trouble() -> None:
    process = Surrogate(np.zeros((3, 2)), np.full(3, 0.5))
    assert process.upper_bounds(np.ones((1, 2)), 0.0) == pytest.approx(0.5)
