"""Rows of logits, and the memory of rows of keys and values."""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
import torch.nn.functional as F

from foretell.native import library
from foretell.native import rows as native
from foretell.ops.common_prefix import common

MANY = 1 << 15  # entries of a block above which `best` looks for the best groups first
FEW = 64  # entries of a row up to which the C library keeps them in order as it reads


def firsts(rows: torch.Tensor) -> list[int]:
    """The best token of each row (n, V), ties to the lowest id.

    -1 where a row has none: it holds NaN, or nothing above -inf.
    """
    if rows.device.type != "cpu":
        places = rows.argmax(-1)
        best = rows.gather(-1, places[:, None])[:, 0]
        tokens: list[int] = torch.where(best > -torch.inf, places, -1).tolist()
        return tokens
    # On a CPU numpy is faster, and wakes no threads that would slow down the next forward. Its
    # argmax finds NaN first.
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
    """Memory without NaN, which no mask would hide. On a CPU its pages are not touched before they
    are used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(
        dtype
    )


def best(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest of every row of (N, V), best first, and where they stand: (N, min(k, V))
    each. Which of equal values come first is not said.
    """
    if 0 < k <= FEW and in_library(rows):
        return native.best(rows, min(k, rows.shape[1]))
    return _best_by_torch(rows, k)


def best_and_log_sums(
    rows: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`best`, and the logs of the rows' sums of exponentials (N,)."""
    if 0 < k <= FEW and in_library(rows):
        log_sums = torch.empty(len(rows))
        return *native.best(rows, min(k, rows.shape[1]), log_sums), log_sums
    return *_best_by_torch(rows, k), rows.logsumexp(-1)


def likeliest(scores: torch.Tensor) -> tuple[int, float]:
    """The best token of a row (V,), and its chance under the row's softmax: NaN where it has no
    law.
    """
    values, places, log_sums = best_and_log_sums(scores[None], 1)
    return int(places), math.exp(float(values) - float(log_sums))


def masked(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Scores (V,), and -inf in the place of those that `allowed`, bool (V,), leaves out."""
    fits = allowed.dtype is torch.bool and allowed.shape == scores.shape  # else torch says so
    if fits and allowed.device.type == "cpu" and in_library(scores[None]):
        return native.masked(scores, allowed.contiguous())
    return scores.where(allowed.to(scores.device), -math.inf)


def in_library(rows: torch.Tensor) -> bool:
    """Whether the C library reads these rows (N, V) as they lie."""
    return (
        rows.dtype is torch.float32
        and rows.device.type == "cpu"
        and rows.stride(1) == 1
        and not rows.requires_grad
        and library.available()
    )


def _best_by_torch(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """They lie in the k groups of neighbours with the largest maxima, so that of a large block,
    read once, only little is sorted.
    """
    count, width = rows.shape
    group = 64 if width < 1 << 14 else 128
    groups, rest = divmod(width, group)
    if rows.numel() < MANY or k > groups:
        values, places = rows.topk(min(k, width))
        return values, places
    even = rows[:, : width - rest].unflatten(1, (groups, group))
    chosen = even.amax(-1).topk(k).indices
    entries = even.gather(1, chosen[:, :, None].expand(-1, -1, group)).flatten(1)
    if rest:  # the last group is shorter and always looked at
        entries = torch.cat((entries, rows[:, width - rest :]), 1)
        chosen = torch.cat((chosen, chosen.new_full((count, 1), groups)), 1)
    values, places = entries.topk(k)
    return values, chosen.gather(1, places // group) * group + places % group


class Ids:
    """Texts that mostly differ from the last one in a few last tokens, as tensors. Threads may
    share it.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ids = np.empty(0, np.int64)
        self._lock = threading.Lock()

    def of(self, text: list[int]) -> torch.Tensor:
        """(1, L) long, new each time."""
        with self._lock:
            kept = common(self._text, text)
            if len(text) > len(self._ids):
                self._ids = np.resize(self._ids, 2 * len(text))
            self._ids[kept : len(text)] = text[kept:]
            self._text = text
            return torch.from_numpy(self._ids[None, : len(text)].copy())

    def __deepcopy__(self, memo: dict[int, object]) -> Ids:
        """An empty one: it only remembers."""
        return Ids()
