"""Bar charts: well-formed, in proportion, and nothing lost."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.bench.report.plot import (
    CHAR,
    COLOURS,
    WIDTH,
    bar_chart,
    column_chart,
    line_chart,
    stacked_chart,
    track_chart,
)

SPACE = "{http://www.w3.org/2000/svg}"


def read(svg: str) -> tuple[list[str], list[tuple[float, float, str]]]:
    """All texts; (x, width, colour) of every bar."""
    root = ET.fromstring(svg)
    shapes = [
        (float(r.get("x", 0)), float(r.get("width", 0)), str(r.get("fill")))
        for r in root.iter(SPACE + "rect")
    ]
    legend = [s for s in shapes if s[1] == 12]
    return [str(t.text) for t in root.iter(SPACE + "text")], [
        s for s in shapes[1:] if s not in legend
    ]


def test_a_bar_is_as_long_as_its_value() -> None:
    words, drawn = read(
        bar_chart("a title", ["one", "a < b & c"], ["x", "y"], [[1.0, 2.5], [None, 3.0]], "what")
    )
    assert {"a title", "one", "a < b & c", "x", "y", "what", "1.00", "2.50", "3.00"} <= set(words)
    assert [(width, colour) for _, width, colour in drawn] == [
        (pytest.approx(WIDTH / 3, abs=0.1), COLOURS[0]),
        (pytest.approx(WIDTH * 2.5 / 3, abs=0.1), COLOURS[1]),
        (WIDTH, COLOURS[1]),
    ]
    assert len({x for x, _, _ in drawn}) == 1


def test_one_series_needs_no_legend() -> None:
    words, drawn = read(bar_chart("t", ["g"], ["only"], [[0.0]], "a"))
    assert "only" not in words
    assert [width for _, width, _ in drawn] == [0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_every_value_fits_on_the_axis(values: list[float]) -> None:
    words, drawn = read(
        bar_chart("t", [str(i) for i in range(len(values))], ["s"], [[v] for v in values], "a")
    )
    assert len(drawn) == len(values)
    assert all(0 <= width <= WIDTH + 0.1 for _, width, _ in drawn)
    ticks = len(words) - 2 - 2 * len(values)
    assert 2 <= ticks <= 8


# --- charts of a page


def shapes(svg: str, tag: str) -> list[dict[str, str]]:
    return [dict(e.attrib) for e in ET.fromstring(svg).iter(SPACE + tag)]


def test_columns_stand_as_high_as_their_values_with_their_ranges() -> None:
    svg = column_chart(
        ["g & h"],
        ["a", "b", "c"],
        [[(2.0, 1.0, 4.0), None, (4.0, 4.0, 4.0)]],
        "times",
        ["red", "green", "blue"],
    )
    bars_ = [s for s in shapes(svg, "rect") if float(s["height"]) != 12]
    assert [s["fill"] for s in bars_] == ["red", "blue"]
    low, high = (float(s["height"]) for s in bars_)
    assert high == pytest.approx(2 * low, abs=0.2)
    whisker = next(s for s in shapes(svg, "line") if s["stroke-width"] == "1.2")
    assert float(whisker["y1"]) - float(whisker["y2"]) == pytest.approx(1.5 * low, abs=0.2)
    assert {"g & h", "2.00", "4.00", "times"} <= {
        str(t.text) for t in ET.fromstring(svg).iter(SPACE + "text")
    }


def test_columns_may_have_no_base() -> None:
    def wide(svg: str) -> int:
        return sum(s["stroke-width"] == "1.4" for s in shapes(svg, "line"))

    values = [[(250.0, 200.0, 300.0)]]
    assert wide(column_chart(["g"], ["a"], values, "x", ["red"])) == 1
    svg = column_chart(["g"], ["a"], values, "x", ["red"], baseline=None)
    assert not wide(svg)
    assert "250" in [t.text for t in ET.fromstring(svg).iter(SPACE + "text")]


def test_lines_go_through_their_points_and_marks_are_named() -> None:
    svg = line_chart(
        ["a"],
        [[(1.0, 1.0), (4.0, 2.0), (16.0, 3.0)]],
        "x",
        "y",
        ["red"],
        logarithmic=True,
        marks=[(2.0, 1.5, "m < n", "blue"), (2.1, 1.5, "other", "blue")],
    )
    (line,) = shapes(svg, "polyline")
    (x1, y1), (x2, y2), (x3, y3) = [tuple(map(float, p.split(","))) for p in line["points"].split()]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    words = [(str(t.text), float(t.get("y", 0))) for t in ET.fromstring(svg).iter(SPACE + "text")]
    one, two = (
        next(w for w in words if w[0].startswith(name)) for name in ("m < n: 2.0", "other: 2.1")
    )
    assert abs(one[1] - two[1]) >= 14, "names lie on each other"
    assert one[1] < two[1], "the line of a mark would cross the name of one to its left"


def test_numbers_below_a_line_do_not_overlap() -> None:
    line = [(1 + number / 30, 1.0) for number in range(200)]
    svg = line_chart(["a"], [line], "x", "y", ["red"])
    texts = [t for t in ET.fromstring(svg).iter(SPACE + "text") if t.get("text-anchor") == "middle"]
    (height,) = {y for y, n in Counter(t.get("y") for t in texts).items() if n > 1}
    places = [(float(t.get("x", 0)), str(t.text)) for t in texts if t.get("y") == height]
    assert len(places) > 5 and places[0][1] == "1"
    for (x, name), (other, after) in pairwise(places):
        assert other - x > CHAR * (len(name) + len(after)) / 2


def test_ranges_stand_on_their_points_and_fit() -> None:
    svg = line_chart(
        ["a", "b"],
        [[(1.0, 2.0), (2.0, 2.0)]] * 2,
        "x",
        "y",
        ["red", "blue"],
        ranges=[[(1.0, 4.0), (2.0, 2.0)], [(0.0, 8.0), (2.0, 2.0)]],
    )
    drawn = [
        s for s in shapes(svg, "line") if s["stroke"] in ("red", "blue") and s["x1"] == s["x2"]
    ]
    red, _, blue, _ = drawn
    assert red["stroke"] == "red"
    assert blue["stroke"] == "blue"
    assert float(blue["x1"]) - float(red["x1"]) == 5.0
    ends = [float(red["y1"]) - float(red["y2"]), float(blue["y1"]) - float(blue["y2"])]
    assert ends[1] == pytest.approx(ends[0] * 8 / 3, abs=0.2)
    assert min(float(blue["y2"]), float(red["y2"])) > 0


def test_parts_of_a_bar_stand_side_by_side() -> None:
    svg = stacked_chart(["a", "b"], ["x", "y"], [[1.0, 2.0], [0.0, 1.0]], "ms", ["red", "blue"])
    one, two, _, four = [s for s in shapes(svg, "rect") if s["height"] == "18.0"]
    assert float(two["x"]) == pytest.approx(float(one["x"]) + float(one["width"]), abs=0.2)
    assert float(two["width"]) == pytest.approx(2 * float(one["width"]), abs=0.2)
    assert float(four["width"]) == pytest.approx(float(one["width"]), abs=0.2)
    noted = stacked_chart(["a"], ["x"], [[1.0]], "ms", ["red"], ["(host 5 %)"])
    assert "1.00 (host 5 %)" in [t.text for t in ET.fromstring(noted).iter(SPACE + "text")]


def test_a_track_shows_accepted_and_refused_drafts() -> None:
    svg = track_chart(
        [("m", [[1, 0, 0, 0.5], [3, 4, 2, 0.25], [1, 0, 0, 0.25]])], ["grey", "green", "red"]
    )
    drawn = {s["fill"]: s for s in shapes(svg, "rect")}
    own = [s for s in shapes(svg, "rect") if s["fill"] == "grey"]
    assert len(own) == 2
    assert float(drawn["green"]["height"]) == pytest.approx(2 * float(own[0]["height"]), abs=0.2)
    assert float(drawn["red"]["y"]) > float(drawn["green"]["y"])
    assert "var(--line)" in drawn
    words = [str(t.text) for t in ET.fromstring(svg).iter(SPACE + "text")]
    assert "5 in 1.00 s" in words
