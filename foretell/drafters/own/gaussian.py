"""A Gaussian process over points of a cube: what is known of a function from some of its values."""

from __future__ import annotations

import numpy as np

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # tried, times the root of the number of coordinates


class Surrogate:
    """What `values` (n,) at `points` (n, d) of [0, 1]^d say of other points.

    Kernel: Matern, 5/2, of the length in LENGTHS that makes the values likeliest. `noise`: the
    variance of a value that the function does not explain, to that of all values.
    """

    def __init__(self, points: np.ndarray, values: np.ndarray, noise: float = 1e-2):
        self.points = points
        self.mean = float(values.mean())
        self.scale = float(values.std()) or 1.0
        targets = (values - self.mean) / self.scale
        best = -np.inf
        for factor in LENGTHS:
            length = factor * points.shape[1] ** 0.5
            matrix = matern(points, points, length) + noise * np.eye(len(points))
            lower = np.linalg.cholesky(matrix)
            weights = np.linalg.solve(lower.T, np.linalg.solve(lower, targets))
            evidence = -0.5 * targets @ weights - np.log(np.diag(lower)).sum()
            if evidence > best:
                best = evidence
                self.length, self.lower, self.weights = length, lower, weights

    def upper(self, points: np.ndarray, kappa: float) -> np.ndarray:
        """At points (m, d), (m,): the mean and `kappa` standard deviations above it."""
        cross = matern(points, self.points, self.length)
        mean = cross @ self.weights
        explained = np.square(np.linalg.solve(self.lower, cross.T)).sum(0)
        spread = np.sqrt(np.clip(1 - explained, 0, None))
        return np.asarray(self.mean + self.scale * (mean + kappa * spread))


def matern(first: np.ndarray, second: np.ndarray, length: float) -> np.ndarray:
    """The Matern kernel, 5/2, of points (m, d) and (n, d): (m, n)."""
    squares = np.square(first).sum(1)[:, None] + np.square(second).sum(1) - 2 * first @ second.T
    z = np.sqrt(5 * np.clip(squares, 0, None)) / length
    return np.asarray((1 + z + z * z / 3) * np.exp(-z))
