"""A Gaussian process over points of a cube: what is known of a function from some of its values."""

from __future__ import annotations

import numpy as np

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # tried, times the root of the number of coordinates


class Surrogate:
    """An estimate at other points by `values` (n,) at `points` (n, d) of [0, 1]^d.

    Kernel: Matern, 5/2, of the length in LENGTHS that makes the values likeliest. `noise`: the
    variance of a value that the function does not explain, to that of all values.
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, noise: float = 1e-2):
        self.points = points
        self.mean = float(values.mean())
        self.scale = float(values.std()) or 1.0
        scaled_values = (values - self.mean) / self.scale
        best_evidence = -np.inf
        for factor in LENGTHS:
            kernel_length = factor * points.shape[1] ** 0.5
            kernel_matrix = matern_kernel(points, points, kernel_length) + noise * np.eye(
                len(points)
            )
            lower_factor = np.linalg.cholesky(kernel_matrix)
            kernel_weights = np.linalg.solve(
                lower_factor.T, np.linalg.solve(lower_factor, scaled_values)
            )
            evidence = -0.5 * scaled_values @ kernel_weights - np.log(np.diag(lower_factor)).sum()
            if evidence > best_evidence:
                best_evidence = evidence
                self.length, self.lower, self.weights = kernel_length, lower_factor, kernel_weights

    def upper_bounds(self, points: np.ndarray, kappa: float) -> np.ndarray:
        """At points (m, d), (m,): the mean and `kappa` standard deviations above it."""
        cross_kernel = matern_kernel(points, self.points, self.length)
        mean = cross_kernel @ self.weights
        explained_share = np.square(np.linalg.solve(self.lower, cross_kernel.T)).sum(0)
        spread = np.sqrt(np.clip(1 - explained_share, 0, None))
        return np.asarray(self.mean + self.scale * (mean + kappa * spread))


def matern_kernel(
    left_points: np.ndarray, right_points: np.ndarray, kernel_length: float
) -> np.ndarray:
    """The Matern kernel, 5/2, of points (m, d) and (n, d): (m, n)."""
    squared_distances = (
        np.square(left_points).sum(1)[:, None]
        + np.square(right_points).sum(1)
        - 2 * left_points @ right_points.T
    )
    z = np.sqrt(5 * np.clip(squared_distances, 0, None)) / kernel_length
    return np.asarray((1 + z + z * z / 3) * np.exp(-z))
