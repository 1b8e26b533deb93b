"""Rows of logits, and the memory of rows of keys and values."""

from __future__ import annotations

import numpy as np
import torch


def firsts(rows: torch.Tensor) -> list[int]:
    """The best token of each row (n, V), ties to the lowest id."""
    # On a CPU numpy is quicker, and wakes no threads that would stand in the way of the next forward.
    values = rows.numpy() if rows.device.type == "cpu" else rows
    best: list[int] = values.argmax(-1).tolist()
    return best


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory without NaN, which no mask would hide. On a CPU it is not touched before it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)
