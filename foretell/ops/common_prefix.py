"""Texts that are asked about one after the other, and mostly differ in a few last tokens."""

from __future__ import annotations

from collections.abc import Sequence


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two lists begin with alike: mostly all but a few."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
