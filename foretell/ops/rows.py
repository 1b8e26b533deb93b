"""The best entries of many or wide rows."""

from __future__ import annotations

import torch

MANY = 1 << 19  # entries of a block from which looking for the best groups first is faster than one call


def best(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest of every row of (N, V), best first, and where they stand: (N, min(k, V)) each.

    They lie in the k groups of neighbours with the largest maxima, so that a large block is read once and little of it
    is sorted. Which of equal values come first is not said.
    """
    count, width = rows.shape
    group = 64 if width < 1 << 14 else 128
    groups, rest = divmod(width, group)
    if rows.numel() < MANY or k > groups:
        values, places = rows.topk(min(k, width))
        return values, places
    even = rows[:, : width - rest].unflatten(1, (groups, group))
    chosen = even.amax(-1).topk(k).indices
    few = even.gather(1, chosen[:, :, None].expand(-1, -1, group)).flatten(1)
    if rest:
        few = torch.cat((few, rows[:, width - rest :]), 1)
        chosen = torch.cat((chosen, chosen.new_full((count, 1), groups)), 1)
    values, places = few.topk(k)
    return values, chosen.gather(1, places // group) * group + places % group
