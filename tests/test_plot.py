"""Bar charts: well-formed, in proportion, and nothing lost."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.plot import COLOURS, WIDTH, bars

SPACE = "{http://www.w3.org/2000/svg}"


def read(svg: str) -> tuple[list[str], list[tuple[float, float, str]]]:
    """All texts; (x, width, colour) of every bar."""
    root = ET.fromstring(svg)
    shapes = [(float(r.get("x", 0)), float(r.get("width", 0)), str(r.get("fill"))) for r in root.iter(SPACE + "rect")]
    legend = [s for s in shapes if s[1] == 12]
    return [str(t.text) for t in root.iter(SPACE + "text")], [s for s in shapes[1:] if s not in legend]


def test_a_bar_is_as_long_as_its_value() -> None:
    words, drawn = read(bars("a title", ["one", "a < b & c"], ["x", "y"], [[1.0, 2.5], [None, 3.0]], "what"))
    assert {"a title", "one", "a < b & c", "x", "y", "what", "1.00", "2.50", "3.00"} <= set(words)
    assert [(width, colour) for _, width, colour in drawn] == [
        (pytest.approx(WIDTH / 3, abs=0.1), COLOURS[0]),
        (pytest.approx(WIDTH * 2.5 / 3, abs=0.1), COLOURS[1]),
        (WIDTH, COLOURS[1]),
    ]
    assert len({x for x, _, _ in drawn}) == 1


def test_one_series_needs_no_legend() -> None:
    words, drawn = read(bars("t", ["g"], ["only"], [[0.0]], "a"))
    assert "only" not in words and [width for _, width, _ in drawn] == [0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_every_value_fits_on_the_axis(values: list[float]) -> None:
    words, drawn = read(bars("t", [str(i) for i in range(len(values))], ["s"], [[v] for v in values], "a"))
    assert len(drawn) == len(values) and all(0 <= width <= WIDTH + 0.1 for _, width, _ in drawn)
    ticks = len(words) - 2 - 2 * len(values)
    assert 2 <= ticks <= 8
