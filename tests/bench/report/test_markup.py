"""Pieces of HTML."""

from __future__ import annotations

from foretell.bench.report.markup import colour_at
from foretell.bench.report.style import SERIES


def test_many_contenders_have_colours_of_their_own() -> None:
    assert len({colour_at(i) for i in range(3 * SERIES)}) == 3 * SERIES
