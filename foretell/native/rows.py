"""Attention over listed rows of a cache, the best of scores and logits, and draws, in C.

Tensors are of a CPU. Keys and values are float32 or bfloat16, and may be views whose rows' numbers
lie beside each other; all sums are of float32.
"""

from __future__ import annotations

import math

import torch

from foretell.native import library

DTYPES = (torch.float32, torch.bfloat16)


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the library reads these tensors of rows (KV, rows, D)."""
    return library.available() and all(
        rows.dtype is tensors[0].dtype
        and rows.dtype in DTYPES
        and rows.device.type == "cpu"
        and rows.stride(2) == 1
        for rows in tensors
    )


def lie_in_columns(rows: torch.Tensor) -> bool:
    """Whether these rows (KV, rows, D) lie beside each other, number by number, as the transpose of
    a contiguous tensor (KV, D, rows) does; for `products` alone.
    """
    fits = rows.stride(1) == 1 and rows.stride(2) > 1 and rows.dtype in DTYPES
    return fits and rows.device.type == "cpu" and library.available()


def _reading(q: torch.Tensor, keys: torch.Tensor) -> library.Reading:
    """What there is to read for q (H, n, D) float32, contiguous. Raises ValueError."""
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


def read(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    lists: torch.Tensor | None = None,
    page: int = 1,
    first: int | None = None,
    read: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    log_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """q (H, n, D) over keys and values (KV, rows, D) -> (n, H, D) float32.

    Which rows are read: those of the pages of `page` rows in `lists` int32 (H or KV, n, pages),
    ascending, and all from `first` on; or those of `read`, bool (H or KV, n, rows); else all.
    `mask`: added to scores, (n, rows) or (H or 1, n, rows); -inf hides. Into `weights` (KV, n,
    rows) float32 goes what rows are given, the mean over query heads that share keys; into
    `log_sums` (n, H) float32 the logs of the sums of exponentials, -inf where nothing is read.
    """
    heads, nodes, _ = q.shape
    q = q.float().contiguous()
    reading = _reading(q, keys)
    kv_heads, rows, _ = keys.shape
    if values.shape[:2] != keys.shape[:2] or not takes(keys, values):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ")
    if mask is not None:
        mask = mask.float().contiguous()
        shared = mask.dim() == 2 or len(mask) == 1
        shape = (nodes, rows) if mask.dim() == 2 else (len(mask) if shared else heads, nodes, rows)
        reading.mask = library.placed(mask, shape, torch.float32)
        reading.mask_head = 0 if shared else nodes * rows
    if lists is not None:
        lists = lists.to(torch.int32).contiguous()
        shape = (len(lists), nodes, lists.shape[-1])
        reading.lists = library.placed(lists, shape, torch.int32)
        reading.owners, _, reading.longest = shape
        reading.page = page
        reading.first = rows if first is None else first
    elif read is not None:
        read = read.contiguous()
        reading.read = library.placed(read, (len(read), nodes, rows), torch.bool)
        reading.owners = len(read)
    out = torch.empty(nodes, heads, values.shape[2])
    reading.values, reading.value_width = values.data_ptr(), values.shape[2]
    reading.value_head, reading.value_row = values.stride()[:2]
    reading.scale, reading.out = scale, out.data_ptr()
    if weights is not None:
        reading.weights = library.placed(weights, (kv_heads, nodes, rows), torch.float32)
    if log_sums is not None:
        reading.log_sums = library.placed(log_sums, (nodes, heads), torch.float32)
    library.library().ft_read(reading, library.threads())
    return out


def products(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """q (H, n, D) with all rows of keys (KV, rows, D) -> (H, n, rows) float32. The keys' rows may
    lie in columns. `out`: where they go, a part of the rows of a contiguous tensor.
    """
    q = q.float().contiguous()
    reading = _reading(q, keys)
    if out is None:
        out = torch.empty(*q.shape[:2], keys.shape[1])
    fits = out.dtype is torch.float32 and out.shape == (*q.shape[:2], keys.shape[1])
    if not fits or out.stride(2) != 1 or out.stride(0) != q.shape[1] * out.stride(1):
        raise ValueError(f"products of {tuple(q.shape)} do not go to {tuple(out.shape)}")
    reading.out, reading.out_row = out.data_ptr(), out.stride(1)
    library.library().ft_products(reading, library.threads())
    return out


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` highest scores (..., rows) float32, ascending, int32; of equal ones
    the first. Raises ValueError for a count that is not 1 to `rows`.
    """
    scores = scores.contiguous()
    places = torch.empty(*scores.shape[:-1], max(count, 0), dtype=torch.int32)
    given = library.placed(scores, scores.shape, torch.float32)
    sizes = math.prod(scores.shape[:-1]), scores.shape[-1], count
    library.library().ft_highest(given, *sizes, places.data_ptr(), library.threads())
    return places


def best(
    rows: torch.Tensor, k: int, log_sums: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` best of rows of logits (N, V) float32, best first and of equals the first, and where
    they stand (N, k each). Into `log_sums` (N,) float32 go the logs of the rows' sums of
    exponentials. Raises ValueError where V is less than k.
    """
    count, width = rows.shape
    values = torch.empty(count, max(k, 0))
    places = torch.empty(values.shape, dtype=torch.int32)
    if log_sums is not None:
        library.placed(log_sums, (count,), torch.float32)
    library.library().ft_best(
        _row(rows),
        rows.stride(0),
        *(count, width, k),
        values.data_ptr(),
        places.data_ptr(),
        library.address(log_sums),
        library.threads(),
    )
    return values, places.long()


def _row(numbers: torch.Tensor) -> int:
    """Where numbers (..., V) float32 lie whose last ones lie beside each other. Raises ValueError
    for others.
    """
    if numbers.dtype is not torch.float32 or (numbers.stride(-1) != 1 and numbers.shape[-1] > 1):
        raise ValueError(f"rows of {numbers.dtype} {tuple(numbers.shape)} are not read")
    return numbers.data_ptr()


def masked(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits (V,) float32, and -inf in the place of those that `allowed`, bool (V,), leaves out."""
    out = torch.empty(len(logits))
    marks = library.placed(allowed, (len(logits),), torch.bool)
    library.library().ft_masked(_row(logits), marks, len(logits), out.data_ptr())
    return out


def draw(weights: torch.Tensor, u: float) -> int:
    """The first place at which the sum of weights (V,) float32 up to it is above `u`, in [0, 1), of
    the whole sum; -1 where they have no finite sum above 0.
    """
    token: int = library.library().ft_draw(_row(weights), len(weights), u)
    return token


def nucleus(logits: torch.Tensor, share: float) -> torch.Tensor | None:
    """The fewest largest of logits (V,) float32 whose chances reach `share`, and -inf in the place
    of all others; None where rounding could decide which they are.
    """
    kept = torch.empty(len(logits))
    found = library.library().ft_nucleus(_row(logits), len(logits), share, kept.data_ptr())
    return kept if found else None
