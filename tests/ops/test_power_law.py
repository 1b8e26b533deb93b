"""The metric of power law graph attention: its last part number by number, and how far metrics are
from each other.
"""

from __future__ import annotations

import math

import torch

from foretell.ops.power_law import POSITIVE, curvature, gated_square, metric_spread


def test_the_last_part_number_by_number() -> None:
    torch.manual_seed(0)
    a_matrix, weight, bias, power, coupling, extra = torch.randn(6, 2, 3, 3, dtype=torch.float64)
    found = curvature(a_matrix, weight, bias, power, coupling, extra)
    for head in range(2):
        powered = [[0.0] * 3 for _ in range(3)]
        for i in range(3):
            for j in range(3):
                x = sum(float(weight[head, i, k] * a_matrix[head, k, j]) for k in range(3))
                x += float(bias[head, i, j])
                positive = x * x / (1 + math.exp(-x)) + 1e-9
                powered[i][j] = positive ** float(power[head, i, j])
        for i in range(3):
            for j in range(3):
                y = sum(float(coupling[head, i, k]) * powered[k][j] for k in range(3))
                assert math.isclose(found[head, i, j], y + float(extra[head, i, j]), rel_tol=1e-9)
    # Powers of whole matrices and products by elements are others.
    assert not torch.allclose(found, coupling * gated_square(weight @ a_matrix + bias) ** power)


def test_narrow_formats_stay_finite() -> None:
    """Where A is 0 a negative power must not be that of 0."""
    zero = torch.zeros(1, 2, 2, dtype=torch.float16)
    power, one = torch.full_like(zero, -0.5), torch.ones_like(zero)
    found = curvature(zero, one, zero, power, one, zero)
    assert found.dtype == torch.float32 and bool(found.isfinite().all())
    assert math.isclose(float(found[0, 0, 0]), 2 * POSITIVE**-0.5, rel_tol=1e-3)
    assert float(torch.tensor(POSITIVE).half()) == 0


def test_metrics_that_are_the_same_are_no_distance_apart() -> None:
    torch.manual_seed(0)
    metric = torch.randn(2, 3, 4, 4)
    assert metric_spread([metric, metric.clone()]) == {"rmse": 0.0, "determinant": 0.0}
    singular = torch.ones(1, 1, 2, 2)
    assert metric_spread([singular, singular.clone()])["determinant"] == 0
    assert metric_spread([singular, singular + torch.eye(2)])["determinant"] == math.inf
    apart = metric_spread([metric, 3 * metric])
    assert math.isclose(apart["rmse"], 0.5, rel_tol=1e-6)  # each is half the mean from it
    assert math.isclose(apart["determinant"], 3**4 - 1, rel_tol=1e-4)
