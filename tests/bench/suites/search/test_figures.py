"""Figures are of pairs, and what lengths of samples say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from foretell.bench.suites.search.figures import (
    length_statistics,
    method_cells,
    shortest_right_chance,
    tables,
)


def _answer(number: int, method: str, score: float, **more: Any) -> dict[str, Any]:
    about = {"model": "m", "dtype": "d", "sort": "sums", "number": number, "method": method}
    cost = {"public": score, "found": None, "forwards": 4, "tokens": 3, "reason": "stop"}
    return about | cost | {"score": score} | more


def test_differences_are_taken_task_by_task_to_the_first_method() -> None:
    scores = {"plain": [1, 0, 0, 0.8], "search": [1, 1, 0, 1]}
    answers = [
        _answer(number, name, score, tokens=number if name == "plain" else 9)
        for name, own in scores.items()
        for number, score in reversed(list(enumerate(own)))
    ]
    plain, searched = method_cells(answers, lambda sort: ["plain", "search"])
    assert plain["solved"] == 0.25 and searched["solved"] == searched["score"] == 0.75
    assert plain["score"] == 0.45 and plain["tasks"] == 4
    assert plain["solved_more"] == {"mean": 0, "low": 0, "high": 0}
    more = searched["solved_more"]
    assert more["mean"] == 0.5 and 0 <= more["low"] < 0.5 < more["high"] <= 1
    assert searched["tokens_more"]["mean"] == 9 - 1.5
    ((title, (head, *rows)),) = tables({"cells": [plain, searched]})
    assert title == "sums, m, d: 4 tasks, differences to plain"
    assert rows[0][:3] == ["plain", "25.0%", "0.45"] and rows[0][-2:] == ["", ""]
    assert rows[1][head.index("solves more")].startswith("+50.0% (+")


def test_only_tasks_that_both_answered_are_compared() -> None:
    answers = [_answer(n, "a", 0) for n in range(3)] + [_answer(n, "b", 1) for n in (1, 2, 5)]
    _, other = method_cells(answers, lambda sort: ["a", "b", "c"])
    assert other["tasks"] == 3 and other["solved_more"]["mean"] == 1


def test_entries_are_counted_where_answers_have_them() -> None:
    answers = [_answer(n, name, 0, found=n + (name == "b")) for n in (1, 2) for name in "ab"]
    document = {"cells": method_cells(answers, lambda sort: ["a", "b"])}
    ((_, (head, first, second)),) = tables(document)
    place = head.index("right entries")
    assert first[place] == "1.5" and second[place] == "2.5 +1.0 (+1.0 to +1.0)"


@pytest.mark.parametrize(
    ("right", "wrong", "want"),
    [
        # The fixture of the notes on the paper: spreads 2 and 3, then 3 and 2.
        ((8, 2), (11, 3), (0.6, 0.811, 0.827, 0.788)),
        ((8, 3), (11, 2), (0.6, 0.871, 0.988, 0.998)),
    ],
)
def test_the_shortest_of_n_by_two_normal_lengths(
    right: tuple[float, float], wrong: tuple[float, float], want: tuple[float, ...]
) -> None:
    found = [shortest_right_chance(0.6, right, wrong, n) for n in (1, 4, 16, 64)]
    assert found == pytest.approx(want, abs=0.012)


def test_the_shortest_of_n_samples_by_counting() -> None:
    samples = [[5, 1], [3, 0], [9, 1], [3, 1]]
    told = length_statistics([_answer(0, "best-of", 1, samples=samples)])
    assert told["right"] == 3 / 4 and told["samples"] == 4
    assert told["of_right"][0] == pytest.approx((5 + 9 + 3) / 3 / 5)
    counted = {one["n"]: one["counted"] for one in told["first_of"]}
    for n, value in counted.items():
        groups = list(itertools.combinations(range(4), n))
        shortest = [min(group, key=lambda place: (samples[place][0], place)) for group in groups]
        assert value == pytest.approx(sum(samples[s][1] for s in shortest) / len(groups))
    assert set(counted) == {1, 2, 4}
    (_, (title, rows)) = tables(
        {
            "cells": method_cells(
                [_answer(0, "best-of", 1, samples=samples)], lambda sort: ["best-of"]
            )
        }
    )
    assert title == "samples" and rows[1][:3] == ["sums best-of", "4", "75.0%"]


def test_samples_of_one_sort_say_nothing() -> None:
    assert length_statistics([_answer(0, "best-of", 1, samples=[[3, 1], [4, 1]])]) == {}
    assert length_statistics([_answer(0, "plain", 1)]) == {}
