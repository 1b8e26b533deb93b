"""Rows of logits, and the memory of rows of keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

OUTPUTS, LARGE = (
    16,
    1 << 21,
)  # blocks of logits whose memory is kept for later ones, and the bytes one may have
MANY = (
    1 << 19
)  # entries of a block from which looking for the best groups first is faster than one call


def firsts(rows: torch.Tensor) -> list[int]:
    """The best token of each row (n, V), ties to the lowest id.

    -1 where a row has none: it holds NaN, or nothing above -inf.
    """
    if rows.device.type != "cpu":
        places = rows.argmax(-1)
        best = rows.gather(-1, places[:, None])[:, 0]
        tokens: list[int] = torch.where(best > -torch.inf, places, -1).tolist()
        return tokens
    # On a CPU numpy is quicker, and wakes no threads that would stand in the way of the next
    # forward. Its argmax finds NaN first.
    values = rows.numpy()
    tokens = values.argmax(-1).tolist()
    for i, token in enumerate(tokens):
        if not values[i, token] > -np.inf:
            tokens[i] = -1
    return tokens


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


class Lent:
    """Memory of rows of logits (k, V), lent again when nobody holds them any more. New memory would
    take time.
    """

    def __init__(self, make: Callable[[np.ndarray], Any] = lambda memory: None):
        """`make(memory)` is what a runtime wants to have of it besides."""
        self.make = make
        self.blocks: list[tuple[np.ndarray, Any, weakref.ref[np.ndarray]]] = []

    def take(self, count: int, width: int) -> tuple[np.ndarray, Any]:
        """(count, width) numbers, which live as long as any tensor made of them, and what `make`
        said of them.
        """
        i = next(
            (i for i, (m, _, held) in enumerate(self.blocks) if held() is None and len(m) == count),
            -1,
        )
        if i < 0:
            memory = np.empty((count, width), np.float32)
            made = self.make(memory)
        else:
            memory, made, _ = self.blocks.pop(i)
        view = memory.view()
        if memory.nbytes <= LARGE:
            self.blocks = [*self.blocks[1 - OUTPUTS :], (memory, made, weakref.ref(view))]
        return view, made


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
