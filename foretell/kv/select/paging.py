"""Pages of rows, and what a query can give to any key of a page at most."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretell.ops.row_attention import query_products


def page_extremes(keys: torch.Tensor, page: int) -> torch.Tensor:
    """The largest and then the smallest number of each channel of keys (KV, rows, D) in every whole
    page, (KV, pages, 2 * D).
    """
    full_rows = keys.shape[1] // page * page
    page_keys = keys[:, :full_rows].unflatten(1, (-1, page))
    return torch.cat([page_keys.amax(2), page_keys.amin(2)], -1)


def join_extremes(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Extremes (..., 2 * D) that hold for the keys of both."""
    width = first.shape[-1] // 2
    largest = first[..., :width].maximum(second[..., :width])
    return torch.cat([largest, first[..., width:].minimum(second[..., width:])], -1)


def upper_bounds(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The most that each query (H, n, D) can give to any key of each page, (H, n, pages).

    Positive numbers of the query meet the largest of the keys, negative ones the smallest. Source:
    Quest (arXiv:2406.10774), section 3.3.
    """
    return query_products(torch.cat([q.clamp(min=0), q.clamp(max=0)], -1), bounds)


def inherit_choices(parents: Sequence[int], chooses_anew: Sequence[bool]) -> list[int]:
    """The node whose choice holds for each node (parents before their children, -1: the text above
    all of them): itself where it chooses anew, else its parent's; -1: the text's.
    """
    choice_nodes: list[int] = []
    for node, parent in enumerate(parents):
        choice_nodes.append(
            node if chooses_anew[node] else -1 if parent < 0 else choice_nodes[parent]
        )
    return choice_nodes
