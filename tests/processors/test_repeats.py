"""What a list ends with again and again, against a search through all stretches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foretell.processors.repeats import Repeats


def longhand(items: Sequence[Any]) -> tuple[int, int]:
    """What `Repeats.find_repeat` says."""
    for length in range(1, len(items) // 2 + 1):
        last = items[len(items) - length :]
        times = 0
        start = len(items) - 2 * length
        while start >= 0 and items[start : start + length] == last:
            times += 1
            start -= length
        if times:
            return length, times
    return 0, 0


@given(st.lists(st.one_of(st.integers(0, 2), st.integers(-9, -1)), max_size=60))
def test_the_shortest_stretch_is_found_whatever_was_taken_back(moves: list[int]) -> None:
    """Negative moves take elements back."""
    repeats, items = Repeats(), list[int]()
    for move in moves:
        if move < 0:
            repeats.cut_items(max(0, len(items) + move))
            del items[max(0, len(items) + move) :]
        else:
            repeats.append_item(move)
            items.append(move)
        assert repeats.items == items and repeats.find_repeat() == longhand(items)


def test_rounds_are_counted() -> None:
    repeats = Repeats()
    for item in [9, 1, 2, 3] + [1, 2, 3] * 4:
        repeats.append_item(item)
    assert repeats.find_repeat() == (3, 4)
    repeats.append_item(1)
    assert repeats.find_repeat() == (3, 4), "3 1 and so on: a round may begin anywhere"
    repeats.append_item(1)
    assert repeats.find_repeat() == (1, 1)
