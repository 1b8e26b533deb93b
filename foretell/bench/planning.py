"""Which draft model, draft length and batch would be fastest, from a few measurements: `foretell
plan`.

After Scylla (arXiv:2505.07858): the tokens that a step commits grow with the logarithms of the
draft model's training tokens D and of its parameters N, which is fitted by least squares, as are
the seconds of a target's and of a draft model's forward. Then

    speed = batch x MAT(D, N, length) / (length x t_draft(N, batch) + t_verify(batch, length))

is worked out wherever that was asked for. Lengths are carried over by the probability a that a
draft is accepted if the one before it was: MAT = 1 + a + ... + a^length. What lies more than ten
times beyond the measurements is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.errors import BadConfig
from foretell.speculation.costs import Costs

VALUES = 3  # of an axis that a fit needs at least
REACH = 10.0  # times beyond the measurements that a prediction may be
ROWS = 512  # cache rows before a forward whose costs come from a profile
Rows = list[dict[str, float]]
FIELDS = {  # of each list of a file, what its entries have, and may have
    "mat": (("tokens", "parameters", "length", "mat"), ("batch", "speed")),
    "verify": (("batch", "length", "seconds"), ()),
    "draft": (("parameters", "batch", "seconds"), ()),
}


# --- measurements


def read_points(path: Path) -> dict[str, Rows]:
    """The lists of a JSON file, each entry tested. Raises BadConfig."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise BadConfig(f"{path}: cannot be read ({cause}); give a JSON file of points") from None
    list_names = ", ".join(map(repr, FIELDS))
    if not isinstance(document, dict) or not set(document) <= set(FIELDS) or "mat" not in document:
        raise BadConfig(
            f"{path}: must be an object with 'mat', and no other lists than {list_names}"
        )
    for list_name, rows in document.items():
        if not isinstance(rows, list) or not rows:
            raise BadConfig(f"{path}: {list_name!r} must be a list of points, and not empty")
        for row_index, row in enumerate(rows):
            _check_point(f"{path}: {list_name}[{row_index}]", row, *FIELDS[list_name])
    return document


def _check_point(
    location: str, row: Any, required_fields: Sequence[str], optional_fields: Sequence[str]
) -> None:
    if not isinstance(row, dict) or not set(required_fields) <= set(row) <= {
        *required_fields,
        *optional_fields,
    }:
        optional_note = f", and may have {', '.join(optional_fields)}" if optional_fields else ""
        raise BadConfig(f"{location}: must have {', '.join(required_fields)}{optional_note}")
    for field_name, value in row.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_plain_step = field_name == "length" and value == 0 and "seconds" in required_fields
        if not (is_number and (is_plain_step or 0 < value < math.inf)):
            raise BadConfig(f"{location}: {field_name}={value!r}: must be a number above 0")
        if field_name in ("batch", "length") and value != int(value):
            raise BadConfig(f"{location}: {field_name}={value!r}: must be a whole number")
    if "mat" in required_fields and not 1 <= row["mat"] <= row["length"] + 1:
        allowed_range = f"between 1 and length + 1 = {row['length'] + 1:g}"
        raise BadConfig(f"{location}: mat={row['mat']!r}: must be {allowed_range}")


def verify_points(costs: Costs, max_tokens: int) -> Rows:
    """Seconds of a target's forward by batch and draft length, from a profile's curve up to
    `max_tokens` tokens.
    """
    seconds_by_tokens = costs.curve(max_tokens, ROWS)
    grid = [(2**i, 2**j - 1) for i in range(7) for j in range(7) if 2 ** (i + j) <= max_tokens]
    return [
        {
            "batch": batch,
            "length": length,
            "seconds": float(seconds_by_tokens[batch * (length + 1) - 1]),
        }
        for batch, length in grid
    ]


def draft_points(parameters: float, costs: Costs, max_tokens: int) -> Rows:
    """Seconds of a draft model's forward by batch, one token of each."""
    seconds_by_tokens = costs.curve(max_tokens, ROWS)
    batches = [2**i for i in range(7) if 2**i <= max_tokens]
    return [
        {"parameters": parameters, "batch": batch, "seconds": float(seconds_by_tokens[batch - 1])}
        for batch in batches
    ]


# --- tokens a step, and the probability of a draft


def mean_tokens(acceptance: float, length: int) -> float:
    """Tokens a step where each of `length` drafts is accepted with this probability if those before
    it were.
    """
    return float(sum(acceptance**depth for depth in range(length + 1)))


def acceptance_for(tokens: float, length: int) -> float:
    """The probability that gives so many tokens a step; what is out of reach is 0 or 1."""
    lower_bound, upper_bound = 0.0, 1.0
    for _ in range(60):
        middle = (lower_bound + upper_bound) / 2
        if mean_tokens(middle, length) < tokens:
            lower_bound = middle
        else:
            upper_bound = middle
    return (lower_bound + upper_bound) / 2


# --- fits


@dataclass(frozen=True)
class Fit:
    """Least squares: value = coefficients . features, with what is known of its errors."""

    what: str
    coefficients: np.ndarray  # (k,)
    spread: float  # standard deviation of the residuals
    inverse: np.ndarray  # (k, k), of the features' products
    r2: float
    ranges: Mapping[str, tuple[float, float]]  # that were measured, by axis
    features: Callable[..., list[float]]
    relative: bool  # whether residuals are shares of the values

    def __call__(self, **at: float) -> tuple[float, float]:
        """The value there and the standard error of one more measurement. Raises BadConfig far from
        what was measured.
        """
        for axis, (range_start, range_end) in self.ranges.items():
            # A length of 0 is a plain step, which every measured length tells of.
            is_plain_step = axis == "length" and not at[axis]
            if not (is_plain_step or range_start / REACH <= at[axis] <= range_end * REACH):
                raise BadConfig(
                    f"{axis}={at[axis]:g}: more than {REACH:g} times beyond what was measured for "
                    f"{self.what} ({range_start:g} to {range_end:g}); measure nearer to it"
                )
        features = np.array(self.features(**at))
        value = float(features @ self.coefficients)
        if self.relative and not value > 0:
            location = ", ".join(f"{axis}={coordinate:g}" for axis, coordinate in at.items())
            message = f"{self.what} at {location}: the fit gives {value:g} s"
            raise BadConfig(f"{message}; measure more points there")
        scaled_features = features / value if self.relative else features
        prediction_error = self.spread * math.sqrt(
            1 + float(scaled_features @ self.inverse @ scaled_features)
        )
        return value, prediction_error * (value if self.relative else 1)


def fit_least_squares(
    quantity: str,
    points: Sequence[Mapping[str, float]],
    axes: Sequence[str],
    features: Callable[..., list[float]],
    values: Sequence[float],
    relative: bool = False,
) -> Fit:
    """Fits `values` at `points`. `relative`: small ones count as much as large ones.

    Raises BadConfig where an axis has too few values, or the points do not tell the axes apart.
    """
    for axis in axes:
        axis_values = {point[axis] for point in points}
        if len(axis_values) < VALUES:
            raise BadConfig(
                f"{quantity}: {len(axis_values)} values of {axis} are too few; "
                f"measure at least {VALUES}"
            )
    y = np.array(values, float)
    x = np.array([features(**{axis: point[axis] for axis in axes}) for point in points])
    weights = 1 / y if relative else np.ones(len(y))
    weighted = x * weights[:, None]
    # Columns of one size, so that rank is not a matter of units.
    units = np.abs(weighted).max(0)
    if len(y) <= x.shape[1] or np.linalg.matrix_rank(weighted / units, tol=1e-6) < x.shape[1]:
        raise BadConfig(
            f"{quantity}: {len(y)} points do not tell {' and '.join(axes)} apart; measure more "
            "combinations of them"
        )
    scaled, *_ = np.linalg.lstsq(weighted / units, y * weights, rcond=None)
    coefficients = scaled / units
    residuals = (x @ coefficients - y) * weights
    spread = math.sqrt(float(residuals @ residuals) / (len(y) - x.shape[1]))
    inverse = np.linalg.inv((weighted / units).T @ (weighted / units)) / np.outer(units, units)
    total_sum = float(((y - y.mean()) ** 2).sum())
    residual_sum = float(((x @ coefficients - y) ** 2).sum())
    r2 = 1 - residual_sum / total_sum if total_sum > 0 else 1.0
    ranges = {}
    for axis in axes:
        measured = [point[axis] for point in points]
        ranges[axis] = (min(number for number in measured if number) or 0.0, max(measured))
    return Fit(quantity, coefficients, spread, inverse, r2, ranges, features, relative)


def _mat_features(tokens: float, parameters: float) -> list[float]:
    return [1.0, math.log(tokens), math.log(parameters)]


def _verify_features(batch: float, length: float) -> list[float]:
    return [1.0, batch, batch * length]


def _draft_features(parameters: float, batch: float) -> list[float]:
    return [1.0, parameters, parameters * batch]


# --- the plan


@dataclass(frozen=True)
class Choice:
    """A configuration. `length` 0: no drafts. Speeds are tokens a second of the whole batch."""

    batch: int
    length: int
    tokens: float
    parameters: float
    mat: float
    mat_error: float  # standard errors
    speed: float
    speed_error: float
    ratio: float  # to plain decoding with this batch


@dataclass(frozen=True)
class Check:
    """A measured point beside what the others predict for it."""

    point: Mapping[str, float]
    mat: float
    mat_error: float
    speed: float | None  # predicted, where the point has one


class Planner:
    """Predictions from measured points: see FIELDS. Raises BadConfig where they are too few."""

    def __init__(self, points: Mapping[str, Rows]):
        self.points = points["mat"]
        lengths = [int(point["length"]) for point in self.points]
        self.reference = max(lengths, key=lengths.count)
        self.mat = self._fit_mat(self.points)
        self.verify = fit_least_squares(
            "t_verify",
            points["verify"],
            ("batch", "length"),
            _verify_features,
            [point["seconds"] for point in points["verify"]],
            relative=True,
        )
        self.draft = fit_least_squares(
            "t_draft",
            points["draft"],
            ("parameters", "batch"),
            _draft_features,
            [point["seconds"] for point in points["draft"]],
            relative=True,
        )

    def _fit_mat(self, points: Rows) -> Fit:
        """Fits the tokens a step with drafts of the reference length."""
        values = []
        for point in points:
            length = int(point["length"])
            mat_value = point["mat"]
            if length != self.reference:
                mat_value = mean_tokens(acceptance_for(mat_value, length), self.reference)
            values.append(mat_value)
        return fit_least_squares("MAT", points, ("tokens", "parameters"), _mat_features, values)

    def tokens_a_step(
        self, tokens: float, parameters: float, length: int, mat_fit: Fit | None = None
    ) -> tuple[float, float]:
        """MAT and its standard error. Raises BadConfig far beyond the measured lengths."""
        longest_length = max(point["length"] for point in self.points)
        if length > REACH * longest_length:
            raise BadConfig(
                f"length={length}: more than {REACH:g} times beyond what was measured for MAT (up "
                f"to {longest_length:g}); measure nearer to it"
            )
        if not length:
            return 1.0, 0.0
        value, error = (mat_fit or self.mat)(tokens=tokens, parameters=parameters)
        if length == self.reference:
            return min(max(value, 1.0), length + 1.0), error
        lower_tokens, expected_tokens, upper_tokens = (
            mean_tokens(acceptance_for(value + shift, self.reference), length)
            for shift in (-error, 0.0, error)
        )
        return expected_tokens, (upper_tokens - lower_tokens) / 2

    def choice(self, batch: int, length: int, tokens: float, parameters: float) -> Choice:
        """Predicts speed and tokens a step of a configuration."""
        mat, mat_error = self.tokens_a_step(tokens, parameters, length)
        plain_seconds, _ = self.verify(batch=batch, length=0)
        seconds, error = self.verify(batch=batch, length=length)
        if length:
            draft_seconds, draft_error = self.draft(parameters=parameters, batch=batch)
            seconds += length * draft_seconds
            error = math.hypot(error, length * draft_error)
        speed = batch * mat / seconds
        speed_error = speed * math.hypot(mat_error / mat, error / seconds)
        ratio = speed * plain_seconds / batch
        return Choice(batch, length, tokens, parameters, mat, mat_error, speed, speed_error, ratio)

    def best_choice(
        self,
        batch: int,
        lengths: Iterable[int],
        tokens: Iterable[float],
        parameters: Iterable[float],
    ) -> Choice:
        """The fastest of all combinations, plain decoding included, which wins ties."""
        sizes = [
            (training_tokens, parameter_count)
            for training_tokens in tokens
            for parameter_count in parameters
        ]
        plain_choice = self.choice(batch, 0, *sizes[0])
        draft_choices = [self.choice(batch, length, *size) for length in lengths for size in sizes]
        return max([plain_choice, *draft_choices], key=lambda choice: choice.speed)

    def checks(self) -> list[Check]:
        """Each measured point, predicted by a fit to the others; those without which no fit is
        possible are left out.
        """
        point_checks = []
        for point_index, point in enumerate(self.points):
            other_points = [*self.points[:point_index], *self.points[point_index + 1 :]]
            training_tokens, parameter_count, length = (
                point["tokens"],
                point["parameters"],
                int(point["length"]),
            )
            try:
                mat, error = self.tokens_a_step(
                    training_tokens, parameter_count, length, self._fit_mat(other_points)
                )
                speed = None
                if "speed" in point:
                    speed = self.choice(
                        int(point.get("batch", 1)), length, training_tokens, parameter_count
                    ).speed
            except BadConfig:
                continue
            point_checks.append(Check(point, mat, error, speed))
        return point_checks
