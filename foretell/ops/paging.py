"""Pages of rows, and what a query can give to any key of a page at most."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def extremes(keys: torch.Tensor, page: int) -> torch.Tensor:
    """The largest and the smallest numbers of whole pages of keys (KV, n, D), (2, KV, pages, D)."""
    pages = keys.unflatten(1, (-1, page))
    return torch.stack([pages.amax(2), pages.amin(2)])


def upper(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """What each query (H, n, D) can give to any key of each page at most, (H, n, pages).

    Positive numbers of the query meet the largest of the keys, negative ones the smallest.
    Source: Quest (arXiv:2406.10774), section 3.3.
    """
    times = len(q) // bounds.shape[1]
    highest, lowest = bounds.repeat_interleave(times, 1)
    return q.clamp(min=0) @ highest.transpose(1, 2) + q.clamp(max=0) @ lowest.transpose(1, 2)


def inherited(parents: Sequence[int], anew: Sequence[bool]) -> list[int]:
    """Of each node (parents before their children, -1: the text above all of them) the one whose
    choice holds for it: itself where it chooses anew, else its parent's; -1: the text's.
    """
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append(node if anew[node] else -1 if parent < 0 else found[parent])
    return found
