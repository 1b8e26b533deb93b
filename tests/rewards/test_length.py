"""Lengths are counted in words."""

from __future__ import annotations

from foretell.rewards.length import Length


def test_it_falls_evenly_to_both_sides() -> None:
    texts = ["", "one", "one two", "a b c d", "a b c d e f", "a b c d e f g h", "a " * 20]
    assert Length(4).scores("", texts) == [0.0, 0.25, 0.5, 1.0, 0.5, 0.0, 0.0]
