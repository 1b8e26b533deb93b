"""Ratios and figures, from invented times and from our own engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from foretell.bench.contenders import Method
from foretell.bench.figures import batch_speed, group_cells, percentile_range
from foretell.bench.peers import Run
from foretell.bench.turns import interleave
from tests import tiny
from tests.bench.fakes import PROMPTS, SMALL, Fake


def test_ratios_come_from_the_same_prompt_and_round() -> None:
    class Slowing(Fake):
        """Each run takes longer than the last one; the warm-up is absurdly slow and must not
        count.
        """

        def run(self, *args: Any) -> list[Run]:
            runs = super().run(*args)
            count = sum(name == self.name and what != "forget" for name, what in self.log)
            factor = 1e6 if count <= 2 else float(count)
            for one in runs:
                one.times = [1.0 + (t - 1.0) * factor for t in one.times]
            return runs

    log: list[tuple[str, Any]] = []
    contenders = [Slowing("plain", 0.4, log), Slowing("fast", 0.1, log)]
    base, fast = group_cells(
        contenders, interleave(contenders, [[[1]], [[2]]], SMALL, 0.0), {}, None
    )
    assert base["ratio"] == pytest.approx({"median": 1, "low": 1, "high": 1})
    assert (
        fast["ratio"] == fast["ratio_to_plain"] == pytest.approx({"median": 4, "low": 4, "high": 4})
    )
    assert base["tokens_per_s"]["high"] == pytest.approx(1 / (0.4 * 3))
    assert base["tokens_per_s"]["low"] == pytest.approx(1 / (0.4 * 6))
    assert fast["ttft_s"]["median"] == 1.0
    assert fast["tpot_s"]["low"] == pytest.approx(0.3)
    assert fast["baseline"] == "plain"
    assert fast["MAT"] == 1.0
    assert (fast["tokens"], fast["steps"]) == (16, 12)
    assert fast["timeline"] == [[1, 0, 0, 1.0], *[[1, 0, 0, pytest.approx(0.3)]] * 3]


def test_speed_counts_what_follows_the_last_first_token() -> None:
    early = Run([1, 2, 3], [1.0, 2.0, 3.0], [1, 1, 1])
    late = Run([1, 2, 3, 4], [2.0, 4.0], [2, 2])
    assert batch_speed([early]) == 1.0
    assert batch_speed([late]) == 1.0
    assert batch_speed([early, late]) == (1 + 2) / 2.0
    assert batch_speed([Run([1], [1.0], [1])]) == 0.0


def test_a_range_leaves_a_tenth_out_on_both_sides() -> None:
    assert percentile_range([float(i) for i in range(1, 21)]) == {
        "median": 10.5,
        "low": 3.0,
        "high": 18.0,
    }
    assert percentile_range([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert percentile_range([]) is None


def test_other_tokens_are_told_with_their_place() -> None:
    log: list[tuple[str, Any]] = []
    contenders = [
        Fake("plain", 1, log),
        Fake("other", 1, log, (5, 6, 9, 8)),
        Fake("short", 1, log, (5, 6)),
    ]
    tallies = interleave(contenders, [[[1]], [[2]]], SMALL, 0.0)
    _, other, short = group_cells(contenders, tallies, {}, None)
    assert other["identical"] == short["identical"] == {"same": 0, "of": 4}
    assert tallies[1].first == (0, 2, [5, 6, 7, 8])
    assert tallies[2].first == (0, 2, [5, 6, 7, 8])


def test_the_inside_of_a_cell_adds_up() -> None:
    lm = tiny.lm()
    contenders = [Method(lm, "plain"), Method(lm, "draft:length=3,nodes=3")]
    batches = [[lm.encode(p)] for p in PROMPTS]
    tallies = interleave(contenders, batches, dataclasses.replace(SMALL, max_new_tokens=32), 0.0)
    plain, draft = group_cells(contenders, tallies, {"target": 1000, "draft": 100}, 1e9)
    assert plain["bytes_per_token"] == 1000
    assert plain["drafted"] == 0
    assert plain["by_depth"] == []
    assert plain["drafted_a_step"] == {"0": plain["steps"]}
    assert plain["MAT"] == 1
    assert draft["identical"] == {"same": 4, "of": 4}
    assert draft["MAT"] > 1
    assert sum(n for _, n in draft["by_depth"]) >= draft["accepted"] > 0
    assert sum(int(n) * count for n, count in draft["drafted_a_step"].items()) <= draft["drafted"]
    assert 1000 / draft["MAT"] < draft["bytes_per_token"] < 1000 / draft["MAT"] + 500
    for cell in (plain, draft):
        seconds = sum(cell["step_s"].values()) * cell["steps"]
        later = cell["tokens"] - 4  # each of the four runs begins with one token
        assert cell["bandwidth_share"] == pytest.approx(
            cell["bytes_per_token"] * later / seconds / 1e9, rel=0.3
        )
        assert min(cell["step_s"].values()) >= 0
        assert (cell["step_s"]["draft"] > 0) == (cell is draft)
        assert cell["host_share"] == pytest.approx(
            cell["step_s"]["host"] / sum(cell["step_s"].values())
        )
    one = 2 * 2 * 2 * 64 * 8 * 4  # 2 layers' keys and values: 2 heads, 64 rows, width 8, float32
    assert plain["cache_bytes"] == one
    assert draft["cache_bytes"] == 2 * one
