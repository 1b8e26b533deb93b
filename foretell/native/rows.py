"""Attention over listed rows of a cache, the best of scores and logits, and draws, in C.

Tensors are of a CPU. Keys and values are float32 or bfloat16, and may be views whose rows' numbers
lie beside each other; all sums are of float32.
"""

from __future__ import annotations

import math

import torch

from foretell.native import library

DTYPES = (torch.float32, torch.bfloat16)


def takes_rows(*tensors: torch.Tensor) -> bool:
    """Whether the library reads these tensors of rows (KV, rows, D)."""
    return library.is_available() and all(
        rows.dtype is tensors[0].dtype
        and rows.dtype in DTYPES
        and rows.device.type == "cpu"
        and rows.stride(2) == 1
        for rows in tensors
    )


def lie_in_columns(rows: torch.Tensor) -> bool:
    """Whether these rows (KV, rows, D) lie beside each other, number by number, as the transpose of
    a contiguous tensor (KV, D, rows) does; for `key_products` alone.
    """
    has_column_strides = rows.stride(1) == 1 and rows.stride(2) > 1 and rows.dtype in DTYPES
    return has_column_strides and rows.device.type == "cpu" and library.is_available()


def _describe_reading(q: torch.Tensor, keys: torch.Tensor) -> library.Reading:
    """Describes what there is to read for q (H, n, D) float32, contiguous. Raises ValueError."""
    if q.dim() != 3 or keys.dim() != 3 or q.shape[2] != keys.shape[2]:
        raise ValueError(f"queries {tuple(q.shape)} read no keys {tuple(keys.shape)}")
    return library.Reading(
        heads=q.shape[0],
        kv_heads=keys.shape[0],
        nodes=q.shape[1],
        rows=keys.shape[1],
        width=keys.shape[2],
        wide=keys.dtype is torch.float32,
        owners=keys.shape[0],
        keys=keys.data_ptr(),
        key_head=keys.stride(0),
        key_row=keys.stride(1),
        key_number=keys.stride(2),
        q=q.data_ptr(),
    )


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    lists: torch.Tensor | None = None,
    page: int = 1,
    first_row: int | None = None,
    read_mask: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    log_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention: q (H, n, D) over keys and values (KV, rows, D) -> (n, H, D) float32.

    Which rows are read: those of the pages of `page` rows in `lists` int32 (H or KV, n, pages),
    ascending, and all from `first_row` on; or those of `read_mask`, bool (H or KV, n, rows); or
    all.
    `mask`: added to scores, (n, rows) or (H or 1, n, rows); -inf hides. Into `weights` (KV, n,
    rows) float32 goes what rows are given, the mean over query heads that share keys; into
    `log_sums` (n, H) float32 the logs of the sums of exponentials, -inf where nothing is read.
    """
    heads, nodes, _ = q.shape
    q = q.float().contiguous()
    reading = _describe_reading(q, keys)
    kv_heads, rows, _ = keys.shape
    if values.shape[:2] != keys.shape[:2] or not takes_rows(keys, values):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ")
    if mask is not None:
        mask = mask.float().contiguous()
        is_shared = mask.dim() == 2 or len(mask) == 1
        tensor_shape = (
            (nodes, rows) if mask.dim() == 2 else (len(mask) if is_shared else heads, nodes, rows)
        )
        reading.mask = library.checked_address(mask, tensor_shape, torch.float32)
        reading.mask_head = 0 if is_shared else nodes * rows
    if lists is not None:
        lists = lists.to(torch.int32).contiguous()
        tensor_shape = (len(lists), nodes, lists.shape[-1])
        reading.lists = library.checked_address(lists, tensor_shape, torch.int32)
        reading.owners, _, reading.longest = tensor_shape
        reading.page = page
        reading.first = rows if first_row is None else first_row
    elif read_mask is not None:
        read_mask = read_mask.contiguous()
        reading.read = library.checked_address(read_mask, (len(read_mask), nodes, rows), torch.bool)
        reading.owners = len(read_mask)
    attention_output = torch.empty(nodes, heads, values.shape[2])
    reading.values, reading.value_width = values.data_ptr(), values.shape[2]
    reading.value_head, reading.value_row = values.stride()[:2]
    reading.scale, reading.out = scale, attention_output.data_ptr()
    if weights is not None:
        reading.weights = library.checked_address(weights, (kv_heads, nodes, rows), torch.float32)
    if log_sums is not None:
        reading.log_sums = library.checked_address(log_sums, (nodes, heads), torch.float32)
    library.load_kernels().ft_read(reading, library.thread_count())
    return attention_output


def key_products(
    q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies q (H, n, D) with all rows of keys (KV, rows, D) -> (H, n, rows) float32. The keys'
    rows may lie in columns. `out`: where the products go, a part of the rows of a contiguous
    tensor.
    """
    q = q.float().contiguous()
    reading = _describe_reading(q, keys)
    if out is None:
        out = torch.empty(*q.shape[:2], keys.shape[1])
    has_right_shape = out.dtype is torch.float32 and out.shape == (*q.shape[:2], keys.shape[1])
    if not has_right_shape or out.stride(2) != 1 or out.stride(0) != q.shape[1] * out.stride(1):
        raise ValueError(f"products of {tuple(q.shape)} do not go to {tuple(out.shape)}")
    reading.out, reading.out_row = out.data_ptr(), out.stride(1)
    library.load_kernels().ft_products(reading, library.thread_count())
    return out


def highest_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The positions of the `count` highest scores (..., rows) float32, ascending, int32; of equal
    ones the first. Raises ValueError for a count that is not 1 to `rows`.
    """
    scores = scores.contiguous()
    positions = torch.empty(*scores.shape[:-1], max(count, 0), dtype=torch.int32)
    score_address = library.checked_address(scores, scores.shape, torch.float32)
    score_sizes = math.prod(scores.shape[:-1]), scores.shape[-1], count
    library.load_kernels().ft_highest(
        score_address, *score_sizes, positions.data_ptr(), library.thread_count()
    )
    return positions


def best_logits(
    rows: torch.Tensor, k: int, log_sums: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` best of rows of logits (N, V) float32, best first and of equals the first, and where
    they stand (N, k each). Into `log_sums` (N,) float32 go the logs of the rows' sums of
    exponentials. Raises ValueError where V is less than k.
    """
    row_count, width = rows.shape
    values = torch.empty(row_count, max(k, 0))
    positions = torch.empty(values.shape, dtype=torch.int32)
    if log_sums is not None:
        library.checked_address(log_sums, (row_count,), torch.float32)
    library.load_kernels().ft_best(
        _row_address(rows),
        rows.stride(0),
        *(row_count, width, k),
        values.data_ptr(),
        positions.data_ptr(),
        library.tensor_address(log_sums),
        library.thread_count(),
    )
    return values, positions.long()


def _row_address(numbers: torch.Tensor) -> int:
    """The address of numbers (..., V) float32 whose last ones lie beside each other. Raises
    ValueError for others.
    """
    if numbers.dtype is not torch.float32 or (numbers.stride(-1) != 1 and numbers.shape[-1] > 1):
        raise ValueError(f"rows of {numbers.dtype} {tuple(numbers.shape)} are not read")
    return numbers.data_ptr()


def mask_logits(logits: torch.Tensor, allowed_mask: torch.Tensor) -> torch.Tensor:
    """Returns logits (V,) float32, with -inf for the tokens that `allowed_mask`, bool (V,), leaves
    out.
    """
    masked_logits = torch.empty(len(logits))
    mask_address = library.checked_address(allowed_mask, (len(logits),), torch.bool)
    library.load_kernels().ft_masked(
        _row_address(logits), mask_address, len(logits), masked_logits.data_ptr()
    )
    return masked_logits


def draw_token(weights: torch.Tensor, u: float) -> int:
    """Draws the first position at which the sum of weights (V,) float32 up to it is above `u`, in
    [0, 1), of the full sum; -1 where they have no finite sum above 0.
    """
    token: int = library.load_kernels().ft_draw(_row_address(weights), len(weights), u)
    return token


def nucleus_logits(logits: torch.Tensor, share: float) -> torch.Tensor | None:
    """Keeps the fewest largest of logits (V,) float32 whose probabilities reach `share`, with -inf
    for all others; None where rounding could decide which they are.
    """
    kept_logits = torch.empty(len(logits))
    is_certain = library.load_kernels().ft_nucleus(
        _row_address(logits), len(logits), share, kept_logits.data_ptr()
    )
    return kept_logits if is_certain else None
