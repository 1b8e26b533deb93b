"""Rows of logits, and the memory of rows of keys and values."""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
import torch.nn.functional as F

from foretell.native import library
from foretell.native import rows as native
from foretell.ops.common_prefix import shared_prefix_length

MANY = 1 << 15  # entries of a block above which `best_logits` looks for the best groups first
FEW = 64  # entries of a row up to which the C library keeps them in order as it reads


def best_token_ids(rows: torch.Tensor) -> list[int]:
    """The best token of each row (n, V), ties to the lowest id.

    -1 where a row has none: it holds NaN, or nothing above -inf.
    """
    if rows.device.type != "cpu":
        positions = rows.argmax(-1)
        best_values = rows.gather(-1, positions[:, None])[:, 0]
        tokens: list[int] = torch.where(best_values > -torch.inf, positions, -1).tolist()
        return tokens
    # On a CPU numpy is faster, and wakes no threads that would slow down the next forward. Its
    # argmax finds NaN first.
    values = rows.numpy()
    tokens = values.argmax(-1).tolist()
    for row_index, token in enumerate(tokens):
        if not values[row_index, token] > -np.inf:
            tokens[row_index] = -1
    return tokens


def resize_row(row: torch.Tensor, width: int) -> torch.Tensor:
    """A row of logits (V,) cut to `width` tokens, or filled up with impossible ones.

    Related models pad their vocabularies to different sizes.
    """
    return F.pad(row[:width], (0, max(0, width - len(row))), value=-torch.inf)


def zero_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates memory without NaN, which no mask would hide. On a CPU its pages are not touched
    before they are used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(
        dtype
    )


def best_logits(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest of every row of (N, V), best first, and where they stand: (N, min(k, V))
    each. Which of equal values come first is not said.
    """
    if 0 < k <= FEW and reads_in_library(rows):
        return native.best_logits(rows, min(k, rows.shape[1]))
    return _best_by_torch(rows, k)


def best_and_log_sums(
    rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `best_logits`, and the logs of the rows' sums of exponentials (N,)."""
    if 0 < count <= FEW and reads_in_library(rows):
        log_sums = torch.empty(len(rows))
        return *native.best_logits(rows, min(count, rows.shape[1]), log_sums), log_sums
    return *_best_by_torch(rows, count), rows.logsumexp(-1)


def likeliest_token(scores: torch.Tensor) -> tuple[int, float]:
    """The best token of a row (V,), and its probability under the row's softmax: NaN where it has
    none.
    """
    values, positions, log_sums = best_and_log_sums(scores[None], 1)
    return int(positions), math.exp(float(values) - float(log_sums))


def mask_scores(scores: torch.Tensor, allowed_mask: torch.Tensor) -> torch.Tensor:
    """Returns scores (V,), with -inf for the tokens that `allowed_mask`, bool (V,), leaves out."""
    mask_fits = (
        allowed_mask.dtype is torch.bool and allowed_mask.shape == scores.shape
    )  # else torch says so
    if mask_fits and allowed_mask.device.type == "cpu" and reads_in_library(scores[None]):
        return native.mask_logits(scores, allowed_mask.contiguous())
    return scores.where(allowed_mask.to(scores.device), -math.inf)


def reads_in_library(rows: torch.Tensor) -> bool:
    """Whether the C library reads these rows (N, V) as they lie."""
    return (
        rows.dtype is torch.float32
        and rows.device.type == "cpu"
        and rows.stride(1) == 1
        and not rows.requires_grad
        and library.is_available()
    )


def _best_by_torch(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Looks in the k groups of neighbours with the largest maxima, so that of a large block, read
    once, only little is sorted.
    """
    row_count, width = rows.shape
    group_size = 64 if width < 1 << 14 else 128
    group_count, rest_width = divmod(width, group_size)
    if rows.numel() < MANY or k > group_count:
        values, positions = rows.topk(min(k, width))
        return values, positions
    grouped_rows = rows[:, : width - rest_width].unflatten(1, (group_count, group_size))
    chosen_groups = grouped_rows.amax(-1).topk(k).indices
    entries = grouped_rows.gather(1, chosen_groups[:, :, None].expand(-1, -1, group_size)).flatten(
        1
    )
    if rest_width:  # the last group is shorter and always looked at
        entries = torch.cat((entries, rows[:, width - rest_width :]), 1)
        chosen_groups = torch.cat(
            (chosen_groups, chosen_groups.new_full((row_count, 1), group_count)), 1
        )
    values, positions = entries.topk(k)
    return values, chosen_groups.gather(
        1, positions // group_size
    ) * group_size + positions % group_size


class Ids:
    """Texts that mostly differ from the last one in a few last tokens, as tensors. Threads may
    share it.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ids = np.empty(0, np.int64)
        self._lock = threading.Lock()

    def ids_of(self, text: list[int]) -> torch.Tensor:
        """Returns a text as a tensor (1, L), long, new each time."""
        with self._lock:
            shared_count = shared_prefix_length(self._text, text)
            if len(text) > len(self._ids):
                self._ids = np.resize(self._ids, 2 * len(text))
            self._ids[shared_count : len(text)] = text[shared_count:]
            self._text = text
            return torch.from_numpy(self._ids[None, : len(text)].copy())

    def __deepcopy__(self, memo: dict[int, object]) -> Ids:
        """Returns an empty one: it only remembers."""
        return Ids()
