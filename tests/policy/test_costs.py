"""What forwards cost: the running means, and the profile on disk. Real seconds are measured but
never compared.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.families.decoder import Decoder
from foretell.families.toy import Toy
from foretell.policy import costs as module
from foretell.policy.costs import Costs, Worth, folder, identity, measure, profile
from tests import tiny


@given(
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.floats(1e-4, 1), max_size=7),
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.floats(0, 1e-5), max_size=7),
    st.integers(0, 5000),
)
def test_costs_never_fall_with_size(
    seconds: dict[int, float], slope: dict[int, float], rows: int
) -> None:
    costs = Costs()
    costs.seconds, costs.slope = seconds, slope
    line = costs.line(130, rows)
    assert (
        all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(line))
        and line[0] > 0
        and line.shape == (130,)
    )


def test_costs_follow_what_is_noted_and_forgive_a_hiccup() -> None:
    costs = Costs()
    for _ in range(100):
        costs.note(1, 0.010)
        costs.note(7, 0.014)
    line = costs.line(8)
    assert (
        line[0] == pytest.approx(0.010)
        and line[7] == pytest.approx(0.014)
        and 0.010 < line[3] < 0.014
    )
    costs.note(1, 5.0)
    assert costs.line(1)[0] < 0.0125
    for _ in range(100):
        costs.note(1, 0.020)
    assert costs.line(1)[0] == pytest.approx(0.020, rel=0.01)


def test_a_machine_that_becomes_slower_or_quicker_is_so_for_every_size() -> None:
    costs = Costs()
    costs.seconds, costs.slope = {1: 0.010, 8: 0.012, 16: 0.016}, {1: 1e-6, 8: 2e-6, 16: 2e-6}
    for speed in (2.0, 0.5):  # only single tokens are computed meanwhile
        ratio = costs.line(16, 500) / costs.line(1, 500)
        for _ in range(60):
            costs.note(1, 0.0105 * speed, rows=500)
        now = costs.line(16, 500)
        assert now[0] == pytest.approx(0.0105 * speed, rel=0.01)
        assert now / now[0] == pytest.approx(ratio, rel=0.4), (
            "what drafts cost must not be judged by another time"
        )
    for _ in range(300):  # a shape that was measured wrongly is found out where both sizes are used
        costs.note(1, 0.010)
        costs.note(16, 0.040)
    assert costs.line(16)[[0, 15]] == pytest.approx([0.010, 0.040], rel=0.05)
    before = costs.line(16)
    costs.note(512, 1.0)
    costs.note(300, 0.5)  # pieces of prompts have any length: they say nothing of other sizes
    assert (costs.line(16) == before).all()


def test_requests_that_share_a_forward_share_its_cost() -> None:
    costs = Costs()
    costs.seconds = {1: 1.0, 8: 1.5, 16: 3.0, 32: 6.0}
    assert costs.share(4, 0, 8).tolist() == [costs.line(32)[8 * n - 1] / 8 for n in (1, 2, 3, 4)]
    assert costs.share(4, 0, 1).tolist() == costs.share(4, 0, 0).tolist() == costs.line(4).tolist()


def test_rows_before_the_tokens_are_taken_into_account() -> None:
    costs = Costs()
    costs.seconds, costs.slope = {1: 1.0, 2: 1.0}, {1: 0.001, 2: 0.002}
    assert costs.line(2, 1000) == pytest.approx([2.0, 3.0]) and costs.line(2) == pytest.approx(
        [1.0, 1.0]
    )
    for _ in range(100):
        costs.note(1, 4.0, rows=1000)
    assert costs.line(1, 1000)[0] == pytest.approx(4.0, rel=0.01) and costs.line(1)[
        0
    ] == pytest.approx(2.0, rel=0.2)


def test_an_asking_that_pays_well_is_followed_by_another_one() -> None:
    worth = Worth()
    for _ in range(24):
        worth.note(0.0, 1.0, 1.0)
    assert worth.pause == worth.wait == 32
    worth.note(1.9, 1.0, 1.0)
    assert worth.pause == worth.wait == 32, "a little more than its price is no luck"
    worth.note(2.0, 1.0, 1.0)
    assert worth.pause == 32 and worth.due()
    worth.note(0.0, 1.0, 1.0)
    assert worth.wait == 32


def test_asking_in_vain_is_paid_for_by_waiting() -> None:
    worth, spent, asked = Worth(), 0.0, 0
    for _ in range(3000):
        if worth.due():
            asked += 1
            spent += 0.1
            worth.note(0.0, 0.1, 1.0)
    assert spent <= 0.012 * 3000 and asked > 100
    for _ in range(20):
        worth.note(2.0, 0.1, 1.0)
    assert worth.due() and worth.due()


def test_pauses_double_so_that_one_bad_draft_costs_little() -> None:
    for unit, last in ((20.0, [31, 32, 32]), (2.0, [31, 63, 90]), (0.01, [31, 63, 127])):
        worth, pauses = Worth(), []
        worth.gain = 0.0
        worth.note(0.0, 9.0, unit)
        for _ in range(7):
            pauses.append(worth.wait)
            worth.note(0.0, 9.0, unit)
        assert pauses == [1, 3, 7, 15, *last], "to 32, or to a twentieth of the time"
    for _ in range(60):
        worth.note(9.0, 0.01, 1.0)
    assert worth.wait == 0
    worth.spent = 1e9
    worth.note(0.0, 1e9, 1.0)
    assert worth.wait == 1, "after a good time it begins anew"


def test_models_of_other_sizes_have_other_profiles() -> None:
    one, other = tiny.lm().models["target"], tiny.lm().models["target"]
    assert identity(one) == identity(other)
    assert isinstance(other, Decoder)
    other.hf.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    assert identity(one) != identity(other) and "Llama" in identity(one)


def test_a_model_is_measured_once_and_the_numbers_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "deep" / "folder"))
    model, told = Toy(5), []
    first, path = profile(model, tell=lambda done, total: told.append((done, total)))
    assert (
        told and told[-1][0] <= told[-1][1] and [d for d, _ in told] == sorted(d for d, _ in told)
    )
    assert sorted(first.seconds) == [1, 2, 4, 8, 16, 32, 64] and min(first.seconds.values()) > 0
    assert [path] == list(folder().rglob("*.json"))
    document = json.loads(path.read_text())
    assert document["about"] == identity(model) and document["schema"] == "foretell.policy.costs/1"
    calls = model.calls
    again, _ = profile(model)
    assert model.calls == calls and again.seconds == first.seconds and again.slope == first.slope
    profile(model, fresh=True)
    assert model.calls > calls


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"about": "x"}', '{"about": 1, "rows": 2, "seconds": 3}']
)
def test_a_damaged_profile_is_measured_again(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    profile(Toy(5))
    (path,) = tmp_path.rglob("*.json")
    good = json.loads(path.read_text())
    for damage in (
        text,
        json.dumps(good | {"seconds": {"1": [0.1]}}),
        json.dumps(good | {"seconds": {"1": [-1, 1]}}),
    ):
        path.write_text(damage)
        model = Toy(5)
        assert min(profile(model)[0].seconds.values()) > 0 and model.calls, (
            "it was not measured again"
        )
        assert json.loads(path.read_text())["about"] == good["about"]


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    assert profile(Toy(5))[0].seconds


def test_what_changes_the_cost_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    base = identity(Toy(5))
    assert base != identity(Toy(6)) and base == identity(Toy(5, 7))
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 99)
    assert identity(Toy(5)) != base


def test_measuring_leaves_short_models_in_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy(5)
    model.context = 40
    seen = measure(model)
    assert sorted(seen) == [1, 2, 4, 8, 16] and all(len(pair) == 2 for pair in seen.values())
    assert np.isfinite([x for pair in seen.values() for x in pair]).all()


def test_what_only_the_first_forward_takes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor compiles then; of a model that is slow every time the first round is the only
    one.
    """
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    for later, rounds in ((0.001, module.ROUNDS), (9.0, 1)):
        took: dict[tuple[int, int], int] = {}

        def once(
            model: Any, cache: Any, n: int, rows: int, took: Any = took, later: float = later
        ) -> float:
            took[n, rows] = took.get((n, rows), 0) + 1
            seconds = 9.0 if took[n, rows] == 1 else later
            now[0] += seconds
            return seconds

        monkeypatch.setattr(module, "_once", once)
        seen = measure(Toy(5))
        assert {x for pair in seen.values() for x in pair} == {later}
        assert max(took.values()) <= 4 * rounds
