"""`foretell plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_planning import draft, mat, points, verify


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "points.json"
    path.write_text(json.dumps(points(noise=0.02)))
    return str(path)


def test_a_weak_fit_is_told(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    path.write_text(json.dumps(points(noise=0.9)))
    code, _, err = run("plan", str(path), "--batches", "1")
    assert code == 0 and "MAT: R² 0." in err and "give more points" in err
    path.write_text(json.dumps(points(noise=0.0)))
    assert "R²" not in run("plan", str(path), "--batches", "1")[2]


def test_a_plan_is_tables_or_a_document(run: Any, file: str) -> None:
    code, out, _ = run("plan", file, "--batches", "1,16", "--tokens", "1e10,5e10")
    assert code == 0
    for said in ("MAT = ", "t_verify = ", "R²", "predicted by the others", "batch 16", "±"):
        assert said in out
    code, out, _ = run("plan", file, "--batches", "1,16", "--lengths", "4", "--json")
    report = json.loads(out)
    assert code == 0 and set(report) == {"fits", "reference_length", "checks", "best"}
    first, last = report["best"]
    assert (first["batch"], last["batch"], first["length"]) == (1, 16, 4)
    d, n = first["tokens"], first["parameters"]
    want = mat(d, n) / (4 * draft(n, 1) + verify(1, 4))
    assert first["speed"] == pytest.approx(want, rel=0.05) and first["speed_error"] > 0
    assert len(report["checks"]) == 9 and report["fits"]["mat"]["r2"] > 0.9


def test_forwards_can_be_measured_here(
    run: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With costs that a clock did not make."""
    import foretell.api.lm  # noqa: F401 - which takes `profile` when it is first imported
    from foretell.engine import cost_profile as profiling
    from foretell.speculation.costs import Costs

    def kept(model: Any) -> tuple[Costs, Path]:
        costs = Costs()
        costs.seconds = {1: 0.01, 64: 0.02}
        return costs, Path("unused")

    monkeypatch.setattr(profiling, "profile_model", kept)
    path = tmp_path / "points.json"
    given = points()
    del given["verify"]
    path.write_text(json.dumps(given))
    code, out, _ = run("plan", str(path), "--profile", "--model", folder, "--json")
    report = json.loads(out)
    assert code == 0 and report["fits"]["verify"]["r2"] == pytest.approx(1)
    assert [choice["batch"] for choice in report["best"]] == [1, 2, 4, 8, 16, 32, 64]
    code, _, err = run("plan", str(path), "--profile", "--model", folder, "--drafts", folder)
    assert code == 2 and "t_draft: 1 values of parameters are too few" in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["none.json"], "none.json: cannot be read"),
        ([], "FILE.json"),
        (["{file}", "--batches", "x"], "--batches x: write numbers"),
        (["{file}", "--batches", "0"], "--batches 0: must be whole numbers of at least 1"),
        (["{file}", "--lengths", "-1"], "--lengths -1"),
        (["{file}", "--tokens", "inf"], "--tokens inf: must be numbers above 0"),
        (["{file}", "--tokens", "1e12"], "tokens=1e+12: more than 10 times beyond"),
        (["{file}", "--batches", "999"], "batch=999: more than 10 times beyond"),
        (["{bare}"], "has no list 'verify'; add it, or give --profile"),
        (["{half}"], "has no list 'draft'; add it, or give --drafts MODEL three times"),
    ],
)
def test_mistakes_are_one_line(
    run: Any, file: str, tmp_path: Path, args: list[str], said: str
) -> None:
    made = points()
    for name in ("draft", "verify"):
        del made[name]
        path = tmp_path / ("half.json" if "verify" in made else "bare.json")
        path.write_text(json.dumps(made))
    places = {"{file}": file, "{bare}": f"{tmp_path}/bare.json", "{half}": f"{tmp_path}/half.json"}
    code, out, err = run("plan", *(places.get(arg, arg) for arg in args))
    assert code == 2 and not out and said in err and err.count("\n") == 1
