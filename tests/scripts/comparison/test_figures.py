"""Medians, ranges and ratios from the runs of a document."""

from __future__ import annotations

import pytest
from comparison.figures import figures, spread

from tests.scripts.comparison.documents import AUTO, INT8, LLAMA, LOOKUP, PLAIN, document, part


def test_a_spread_is_the_median_and_the_tenths() -> None:
    found = spread(range(21))
    assert found is not None
    assert (found.median, found.low, found.high) == (10, 2, 18)
    assert spread([]) is None


def test_ratios_are_taken_prompt_by_prompt() -> None:
    made = figures(document())
    cells = made.cells["chat"]
    auto = cells[AUTO]
    assert auto.speed is not None
    assert (auto.speed.median, auto.speed.low, auto.speed.high) == (90, 60, 120)
    medians = {name: found and found.median for name, found in auto.ratios.items()}
    assert medians == {"transformers": 6.0, "best": 1.5, "best_plain": 3.0, "plain": 2.0}
    assert made.best == {("chat", 16): LOOKUP, ("chat", 8): INT8}
    assert made.best_plain == {("chat", 16): LLAMA, ("chat", 8): INT8}
    lookup = cells[LOOKUP].ratios["plain"]
    assert lookup is not None and lookup.median == 2.0, "its own library's plain decoding"
    assert (auto.mat, auto.same, cells[PLAIN].same) == (2.0, (2, 4), None)


def test_only_runs_that_stood_beside_each_other_are_compared() -> None:
    ours = part({PLAIN: 1.0, "transformers": 1.0})
    theirs = part({LLAMA: 1.0, "transformers": 0.5})
    made = figures(document(ours, theirs))
    plain = made.cells["chat"][PLAIN]
    llama = made.cells["chat"][LLAMA]
    assert plain.ratios["best"] is None, "the best peer was measured at another time"
    for cell, expected in ((plain, 3.0), (llama, 4.0)):
        found = cell.ratios["transformers"]
        assert found is not None and found.median == found.low == found.high == expected


def test_means_are_geometric_and_need_every_set() -> None:
    quick = part({PLAIN: 4.0, "transformers": 1.0}, ("code",))
    made = figures(document(part(), quick))
    assert made.mean(PLAIN, "transformers") == pytest.approx(6.0), "of 3 and 12"
    assert made.mean(AUTO, "transformers") is None


def test_formats_and_the_rest_of_a_document() -> None:
    made = figures(document())
    assert made.bits() == [16, 8]
    assert made.of(16) == ["transformers", LLAMA, LOOKUP, PLAIN, AUTO]
    assert {name: found.median for name, found in made.prefill().items()} == {PLAIN: 2, LLAMA: 1}
    rate = made.memory_rate()
    assert rate is not None and (rate.median, rate.high) == (20e9, 40e9)
    assert list(made.by_part("load")) == ["foretell bfloat16"]


def test_a_run_of_one_step_has_no_speed() -> None:
    short = part()
    for row in short["runs"]["chat"]:
        row[3] = 0.0
    made = figures(document(short))
    assert made.cells["chat"][AUTO].speed is None
    assert made.cells["chat"][AUTO].ratios["transformers"] is None
    assert not made.best
