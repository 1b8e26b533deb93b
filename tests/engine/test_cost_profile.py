"""Measuring costs, and the file they are kept in. Real seconds are measured but never compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell.cache.cache import Cache
from foretell.engine import cost_profile as profiling
from foretell.engine.cost_profile import folder, measure_forwards, model_identity, profile_model
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.costs import SIZES
from foretell.testing.toy import Toy
from tests import tiny


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "deep" / "folder"))
    return tmp_path / "deep" / "folder"


# --- measuring


def test_measuring_leaves_short_models_in_their_context() -> None:
    model = Toy(5)
    model.context = 40
    seconds = measure_forwards(model)
    assert sorted(seconds) == [1, 2, 4, 8, 16]
    assert all(len(pair) == 2 for pair in seconds.values())
    assert np.isfinite([value for pair in seconds.values() for value in pair]).all()


class RowsElsewhere(Toy):
    """A model that shows no layout: its rows lie where only its forwards can write them."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.real_layout = self.layout
        self.layout = ()

    def cache(self, request: Any = None, beside: Any = None) -> Cache:
        return Cache(self.real_layout, self.dtype, self.device)

    def run(self, *args: Any) -> Any:
        self.layout = self.real_layout
        try:
            return super().run(*args)
        finally:
            self.layout = ()


@pytest.mark.parametrize("layout", [True, False], ids=["no forward before", "a forward before"])
def test_forwards_are_measured_after_the_rows_they_are_named_by(
    layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second forward of a size, which could reuse the rows of the first."""
    model = Toy(5, context=600) if layout else RowsElsewhere(5, context=600)
    seen = set()
    run = model.forward

    def forward(jobs: Any) -> Any:
        (job,) = jobs
        assert job.cache.length == job.start
        if len(job.rows) == len(job.tokens):  # not a chunk of the text before
            seen.add((len(job.tokens), job.start))
        return run(jobs)

    monkeypatch.setattr(model, "forward", forward)
    measure_forwards(model)
    assert seen == {(size, length) for size in SIZES for length in (64, 300)}


@pytest.mark.parametrize(("later", "rounds"), [(0.001, profiling.ROUNDS), (9.0, 1)])
def test_what_only_the_first_forward_takes_is_not_counted(
    later: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend compiles then; of a model that is slow every time the first round is the only
    one.
    """
    now = [0.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])
    counts: dict[tuple[int, int], int] = {}

    def time_forward(model: Any, cache: Any, size: int, length: int) -> float:
        counts[size, length] = counts.get((size, length), 0) + 1
        seconds = 9.0 if counts[size, length] == 1 else later
        now[0] += seconds
        return seconds

    monkeypatch.setattr(profiling, "_time_forward", time_forward)
    seconds = measure_forwards(Toy(5))
    assert {value for pair in seconds.values() for value in pair} == {later}
    assert max(counts.values()) <= profiling.REPEATS * rounds


# --- what a measurement is valid for


def test_models_of_other_sizes_have_other_profiles() -> None:
    one = tiny.lm().models["target"]
    other = tiny.lm().models["target"]
    assert model_identity(one) == model_identity(other)
    assert isinstance(other, Decoder)
    other.hf.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    assert model_identity(one) != model_identity(other)
    assert "Llama" in model_identity(one)


def test_what_changes_the_cost_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    base = model_identity(Toy(5))
    assert base != model_identity(Toy(6))
    assert base == model_identity(Toy(5, 7))
    monkeypatch.setattr(profiling.torch, "get_num_threads", lambda: 99)
    assert model_identity(Toy(5)) != base


# --- the file


def test_a_model_is_measured_once_and_the_numbers_are_kept(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_is_outdated", lambda *args: False)  # this clock is a real one
    model = Toy(5)
    told: list[tuple[int, int]] = []
    first, path = profile_model(model, tell=lambda done, total: told.append((done, total)))
    assert told
    assert told[-1][0] <= told[-1][1]
    assert told == sorted(told)
    assert sorted(first.seconds) == list(SIZES)
    assert min(first.seconds.values()) > 0
    assert folder() == cache_folder
    assert list(folder().rglob("*")) == [path.parent, path]
    document = json.loads(path.read_text())
    assert document["about"] == model_identity(model)
    assert document["schema"] == "foretell.policy.costs/1"
    calls = model.calls
    again, _ = profile_model(model)
    assert model.calls == calls
    assert again.seconds == first.seconds
    assert again.slope == first.slope
    profile_model(model, fresh=True)
    assert model.calls > calls


@pytest.mark.parametrize(
    ("now", "measured"),
    [
        ({}, False),
        ({8: 0.5}, True),
        ({1: 3.0}, False),
        ({32: 0.5}, False),
        (dict.fromkeys(SIZES, 0.001), True),
    ],
    ids=["as it was", "quicker", "slower", "quicker where it is not checked", "far quicker"],
)
def test_what_was_measured_on_a_busy_machine_is_measured_again(
    now: dict[int, float], measured: bool, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The slowest take longer than a check may.
    times = {size: 2.0 * size for size in SIZES}
    monkeypatch.setattr(profiling, "_time_forward", lambda model, cache, size, length: times[size])
    model = Toy(5)
    profile_model(model)
    for size, factor in now.items():
        times[size] *= factor
    calls: list[Any] = []
    monkeypatch.setattr(
        profiling, "measure_forwards", lambda *args: calls.append(args) or measure_forwards(*args)
    )
    costs, _ = profile_model(model)
    assert bool(calls) == measured
    if measured:
        assert costs.seconds[8] == pytest.approx(times[8])
        calls.clear()
        profile_model(model)
        assert not calls, "the new numbers are kept"


def test_a_slow_model_is_checked_by_one_forward(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_time_forward", lambda *args: 2.0)
    profile_model(Toy(5))
    sizes: list[int] = []
    monkeypatch.setattr(profiling, "CHECK", 0.0)
    monkeypatch.setattr(profiling, "_time_forward", lambda m, c, size, n: sizes.append(size) or 2.0)
    profile_model(Toy(5))
    assert sizes == [1]


DAMAGES = {
    "empty": "",
    "cut off": "{",
    "no bytes of a text": b"\xff",
    "brackets without end": "[" * 100_000,
    "a list": "[]",
    "without anything": {},
    "another schema": {"schema": "foretell.policy.costs/0"},
    "another model": {"about": "x"},
    "other rows": {"rows": [1, 2]},
    "no seconds": {"seconds": {}},
    "a number for seconds": {"seconds": 3},
    "one number": {"seconds": {"1": [0.1]}},
    "three numbers": {"seconds": {"1": [0.1, 0.1, 0.1]}},
    "below zero": {"seconds": {"1": [-1, 1]}},
    "zero": {"seconds": {"1": [0, 1]}},
    "not a number": {"seconds": {"1": [0.1, float("nan")]}},
    "without end": {"seconds": {"1": [0.1, float("inf")]}},
    "a week": {"seconds": {"1": [0.1, 6e5]}},
    "beyond any float": {"seconds": {"1": [0.1, 10**400]}},
    "a text": {"seconds": {"1": [0.1, "0.1"]}},
    "a truth": {"seconds": {"1": [0.1, True]}},
    "a size that is none": {"seconds": {"one": [0.1, 0.1]}},
    "a size of zero": {"seconds": {"0": [0.1, 0.1]}},
    "a size beyond all": {"seconds": {"4096": [0.1, 0.1]}},
    "falling sizes": {"seconds": {"2": [0.1, 0.1], "1": [0.1, 0.1]}},
    "one size twice": {"seconds": {"2": [0.1, 0.1], "02": [0.1, 0.1]}},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_profile_is_measured_again_with_a_warning(
    damage: Any, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = {size: [0.5, 0.5] for size in SIZES}
    monkeypatch.setattr(profiling, "measure_forwards", lambda model, tell: fresh)
    _, path = profile_model(Toy(5))
    good = path.read_text()
    if isinstance(damage, dict):
        damage = json.dumps(json.loads(good) | damage if damage else {})
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with pytest.warns(UserWarning, match=f"^{path}: .*; the costs are measured again$") as warned:
        costs, _ = profile_model(Toy(5))
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    assert set(costs.seconds.values()) == {0.5}
    assert path.read_text() == good


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    assert profile_model(Toy(5))[0].seconds
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
