"""Rows of logits, and the memory of rows of keys and values."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

MANY = (
    1 << 19
)  # entries of a block from which looking for the best groups first is faster than one call


def firsts(rows: torch.Tensor) -> list[int]:
    """The best token of each row (n, V), ties to the lowest id."""
    # On a CPU numpy is quicker, and wakes no threads that would stand in the way of the next
    # forward.
    values = rows.numpy() if rows.device.type == "cpu" else rows
    best: list[int] = values.argmax(-1).tolist()
    return best


def resized(row: torch.Tensor, width: int) -> torch.Tensor:
    """A row of logits (V,) cut to `width` tokens, or filled up with impossible ones.

    Related models pad their vocabularies to different sizes.
    """
    return F.pad(row[:width], (0, max(0, width - len(row))), value=-torch.inf)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory without NaN, which no mask would hide. On a CPU it is not touched before it is
    used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(
        dtype
    )


def best(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest of every row of (N, V), best first, and where they stand: (N, min(k, V))
    each.

    They lie in the k groups of neighbours with the largest maxima, so that a large block is read
    once and little of it is sorted. Which of equal values come first is not said.
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
