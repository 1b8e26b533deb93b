"""Pages of rows, and what a query can give to any key of a page at most."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretell.ops.row_attention import products


def extremes(keys: torch.Tensor, page: int) -> torch.Tensor:
    """The largest and then the smallest number of each channel of keys (KV, rows, D) in every whole
    page, (KV, pages, 2 * D).
    """
    whole = keys.shape[1] // page * page
    pages = keys[:, :whole].unflatten(1, (-1, page))
    return torch.cat([pages.amax(2), pages.amin(2)], -1)


def widest(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Extremes (..., 2 * D) that hold for the keys of both."""
    width = first.shape[-1] // 2
    largest = first[..., :width].maximum(second[..., :width])
    return torch.cat([largest, first[..., width:].minimum(second[..., width:])], -1)


def upper(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """What each query (H, n, D) can give to any key of each page at most, (H, n, pages).

    Positive numbers of the query meet the largest of the keys, negative ones the smallest.
    Source: Quest (arXiv:2406.10774), section 3.3.
    """
    return products(torch.cat([q.clamp(min=0), q.clamp(max=0)], -1), bounds)


def inherited(parents: Sequence[int], anew: Sequence[bool]) -> list[int]:
    """Of each node (parents before their children, -1: the text above all of them) the one whose
    choice holds for it: itself where it chooses anew, else its parent's; -1: the text's.
    """
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append(node if anew[node] else -1 if parent < 0 else found[parent])
    return found
