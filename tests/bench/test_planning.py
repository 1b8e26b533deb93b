"""The planner: known coefficients come back, and its best is the best there is."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.planning import (
    Planner,
    acceptance_for,
    draft_points,
    mean_tokens,
    read_points,
    verify_points,
)
from foretell.errors import BadConfig
from foretell.speculation.costs import Costs

SIZES = (1e8, 1e9, 1e10)  # training tokens
WIDTHS = (1e6, 1e7, 1e8)  # parameters
A, B, C = -3.0, 0.15, 0.12


def mat(tokens: float, parameters: float) -> float:
    return A + B * math.log(tokens) + C * math.log(parameters)


def verify(batch: float, length: float) -> float:
    return 0.02 + 0.0004 * batch + 0.0002 * batch * length


def draft(parameters: float, batch: float) -> float:
    return 0.0005 + 4e-11 * parameters + 1e-12 * parameters * batch


def points(noise: float = 0.0, length: int = 4) -> dict[str, Any]:
    draw = random.Random(1)
    return {
        "mat": [
            {
                "tokens": d,
                "parameters": n,
                "length": length,
                "mat": mat(d, n) + draw.gauss(0, noise),
            }
            for d in SIZES
            for n in WIDTHS
        ],
        "verify": [
            {"batch": b, "length": g, "seconds": verify(b, g)}
            for b in (1, 4, 16)
            for g in (0, 2, 8)
        ],
        "draft": [
            {"parameters": n, "batch": b, "seconds": draft(n, b)}
            for n in WIDTHS
            for b in (1, 4, 16)
        ],
    }


def test_known_coefficients_come_back() -> None:
    planner = Planner(points())
    assert planner.mat.coefficients.tolist() == pytest.approx([A, B, C], rel=1e-6)
    assert planner.verify.coefficients.tolist() == pytest.approx([0.02, 4e-4, 2e-4], rel=1e-6)
    assert planner.draft.coefficients.tolist() == pytest.approx([5e-4, 4e-11, 1e-12], rel=1e-6)
    for fitted in (planner.mat, planner.verify, planner.draft):
        assert fitted.r2 == pytest.approx(1.0, abs=1e-9)
    choice = planner.choice(8, 4, 3e9, 5e7)
    seconds = 4 * draft(5e7, 8) + verify(8, 4)
    assert choice.mat == pytest.approx(mat(3e9, 5e7))
    assert choice.speed == pytest.approx(8 * mat(3e9, 5e7) / seconds)
    assert choice.ratio == pytest.approx(choice.speed * verify(8, 0) / 8)
    assert choice.speed_error == pytest.approx(0, abs=1e-4)


def test_other_lengths_follow_by_the_chance_of_a_draft() -> None:
    for chance in (0.0, 0.3, 0.8, 0.999, 1.0):
        tokens = mean_tokens(chance, 5)
        assert tokens == pytest.approx(sum(chance**i for i in range(6)))
        assert acceptance_for(tokens, 5) == pytest.approx(chance, abs=1e-9)
    planner = Planner(points())
    chance = acceptance_for(mat(1e9, 1e7), 4)
    assert planner.tokens_a_step(1e9, 1e7, 9)[0] == pytest.approx(mean_tokens(chance, 9))
    assert planner.tokens_a_step(1e9, 1e7, 0) == (1.0, 0.0)
    mixed = points()
    for point in mixed["mat"][::2]:  # measured with other lengths, of the same probabilities
        value = acceptance_for(point["mat"], 4)
        point.update(length=7, mat=mean_tokens(value, 7))
    again = Planner(mixed)
    assert again.reference == 7
    assert again.tokens_a_step(1e9, 1e7, 4)[0] == pytest.approx(mat(1e9, 1e7), rel=0.02)


def test_it_is_monotone() -> None:
    planner = Planner(points())
    more_tokens = [planner.tokens_a_step(d, 1e7, 4)[0] for d in (2e7, 1e8, 3e9, 9e10)]
    more_parameters = [planner.tokens_a_step(1e9, n, 4)[0] for n in (2e5, 1e6, 3e7, 9e8)]
    longer = [planner.tokens_a_step(1e9, 1e7, g)[0] for g in range(41)]
    for values in (more_tokens, more_parameters, longer):
        assert values == sorted(values) and len(set(values)) == len(values)


def test_the_best_is_that_of_a_search_by_plain_loops() -> None:
    draw = random.Random(3)
    planner = Planner(points(noise=0.05))
    seen = set()
    for batch in (1, 2, 8, 40, 150):
        lengths = sorted(draw.sample(range(1, 30), 8))
        sizes, widths = draw.sample([2e7, 1e8, 1e9, 5e10], 3), draw.sample([1e6, 1e7, 9e8], 2)
        best = planner.best_choice(batch, lengths, sizes, widths)
        v = planner.verify.coefficients
        speed, found = batch / (v[0] + v[1] * batch), (0, 0.0, 0.0)
        for g in lengths:
            for d in sizes:
                for n in widths:
                    k = planner.draft.coefficients
                    seconds = v[0] + v[1] * batch + v[2] * batch * g
                    seconds += g * (k[0] + k[1] * n + k[2] * n * batch)
                    here = batch * planner.tokens_a_step(d, n, g)[0] / seconds
                    if here > speed:
                        speed, found = here, (g, d, n)
        assert best.speed == pytest.approx(speed)
        assert (best.length, *((best.tokens, best.parameters) if best.length else (0, 0))) == found
        seen.add(best.length)
    assert len(seen) > 1


def test_plain_decoding_is_among_the_choices() -> None:
    poor = points()
    for point in poor["mat"]:
        point["mat"] = 1 + 1e-3 * math.log(point["tokens"] * point["parameters"])
    best = Planner(poor).best_choice(16, range(1, 9), SIZES, WIDTHS)
    assert best.length == 0 and best.ratio == pytest.approx(1) and best.mat == 1


def test_errors_tell_what_measurements_scatter() -> None:
    """Of 200 sets of noisy points, the truth lies within two standard errors in most."""
    inside = 0
    for seed in range(200):
        noisy = points()
        draw = random.Random(seed)
        for point in noisy["mat"]:
            point["mat"] += draw.gauss(0, 0.05)
        value, error = Planner(noisy).mat(tokens=5e9, parameters=3e7)
        inside += abs(value - mat(5e9, 3e7) - draw.gauss(0, 0.05)) < 2 * error
        assert 0.01 < error < 0.15
    assert inside > 170
    checks = Planner(points(noise=0.05)).checks()
    assert len(checks) == 9
    misses = [abs(check.mat - check.point["mat"]) for check in checks]
    assert max(misses) < 0.3 and min(misses) > 0
    assert sum(m < 2 * check.mat_error for m, check in zip(misses, checks, strict=True)) >= 7


def test_measured_speeds_stand_beside_predicted_ones() -> None:
    told = points()
    told["mat"][4] |= {"batch": 4, "speed": 123.0}
    (check,) = [check for check in Planner(told).checks() if check.speed is not None]
    d, n = told["mat"][4]["tokens"], told["mat"][4]["parameters"]
    assert check.speed == pytest.approx(4 * mat(d, n) / (4 * draft(n, 4) + verify(4, 4)))


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ((1, 4, 2e11, 1e7), r"tokens=2e\+11: more than 10 times .* for MAT \(1e\+08 to 1e\+10\)"),
        ((1, 4, 1e9, 1e5 / 2), r"parameters=50000: more than 10 times"),
        ((1, 41, 1e9, 1e7), "length=41: more than 10 times .* for MAT"),
        ((161, 4, 1e9, 1e7), r"batch=161: more than 10 times .* for t_verify \(1 to 16\)"),
    ],
)
def test_what_lies_far_beyond_the_measurements_is_refused(at: Any, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        Planner(points()).choice(*at)


def test_too_few_values_are_refused() -> None:
    few = points()
    few["mat"] = [point for point in few["mat"] if point["tokens"] != 1e9]
    with pytest.raises(BadConfig, match="MAT: 2 values of tokens are too few; measure at least 3"):
        Planner(few)
    few = points()
    few["mat"] = [
        {"tokens": d, "parameters": d / 100, "length": 4, "mat": mat(d, d / 100)}
        for d in (1e8, 1e9, 1e10, 1e11)
    ]
    with pytest.raises(BadConfig, match="4 points do not tell tokens and parameters apart"):
        Planner(few)
    few = points()
    few["verify"] = few["verify"][:3]
    with pytest.raises(BadConfig, match="t_verify: 1 values of batch"):
        Planner(few)


def test_a_fit_that_gives_no_time_is_refused() -> None:
    steep = points()
    for point in steep["verify"]:
        point["seconds"] = 0.01 + 0.02 * point["batch"] ** 2 + 0.001 * point["length"]
    with pytest.raises(BadConfig, match=r"t_verify at batch=0.2, length=0: the fit gives -"):
        Planner(steep).verify(batch=0.2, length=0)


def test_a_profiles_curve_becomes_points() -> None:
    costs = Costs()
    costs.seconds = {1: 0.010, 64: 0.0163}  # 0.0001 s a token
    rows = verify_points(costs, 64)
    assert {"batch": 8, "length": 7, "seconds": pytest.approx(0.0163)} in rows
    made = points()
    made["verify"] = rows
    made["draft"] = [point for n in WIDTHS for point in draft_points(n, _linear(n), 64)]
    planner = Planner(made)
    assert planner.verify.coefficients.tolist() == pytest.approx([0.0099, 1e-4, 1e-4], rel=1e-6)
    assert planner.draft(parameters=1e7, batch=8)[0] == pytest.approx(8e-4 * 10, rel=1e-6)


def _linear(parameters: float) -> Costs:
    costs = Costs()
    costs.seconds = {size: 1e-10 * parameters * size for size in (1, 2, 4, 8, 16, 32, 64)}
    return costs


# --- files


def test_a_file_gives_its_points(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    path.write_text(json.dumps(points()))
    assert read_points(path) == points()


POINT = {"tokens": 1e9, "parameters": 1e6, "length": 4, "mat": 2.0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read (it is no JSON)"),
        ("[]", "must be an object with 'mat'"),
        ({"mat": [POINT], "other": []}, "no other lists than 'mat', 'verify', 'draft'"),
        ({"verify": []}, "must be an object with 'mat'"),
        ({"mat": []}, "'mat' must be a list of points, and not empty"),
        ({"mat": [POINT, 3]}, "mat[1]: must have tokens, parameters, length, mat, and may have"),
        ({"mat": [{**POINT, "x": 1}]}, "mat[0]: must have tokens"),
        ({"mat": [{**POINT, "tokens": 0}]}, "tokens=0: must be a number above 0"),
        ({"mat": [{**POINT, "tokens": True}]}, "tokens=True: must be a number above 0"),
        ({"mat": [{**POINT, "tokens": math.nan}]}, "tokens=nan: must be a number above 0"),
        ({"mat": [{**POINT, "length": 0}]}, "length=0: must be a number above 0"),
        ({"mat": [{**POINT, "length": 2.5}]}, "length=2.5: must be a whole number"),
        ({"mat": [{**POINT, "mat": 5.5}]}, "mat=5.5: must be between 1 and length + 1 = 5"),
        ({"mat": [POINT], "verify": [{"batch": 1}]}, "verify[0]: must have batch, length, seconds"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "points.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(BadConfig) as caught:
        read_points(path)
    text = str(caught.value)
    assert said in text and text.startswith(str(path)) and "\n" not in text
    with pytest.raises(BadConfig, match="cannot be read"):
        read_points(tmp_path / "none.json")
