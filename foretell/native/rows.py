"""Attention over listed rows of a cache, the best of scores and logits, and draws, in C.

Tensors are of a CPU. Keys and values are float32 or bfloat16, and may be views whose rows' numbers
lie beside each other; all sums are of float32.
"""

from __future__ import annotations

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
    """What there is to read for q (H, n, D) float32, contiguous."""
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
    if mask is not None:
        mask = mask.float().contiguous()
        reading.mask = mask.data_ptr()
        shared = mask.dim() == 2 or len(mask) == 1
        reading.mask_head = 0 if shared else nodes * keys.shape[1]
    if lists is not None:
        lists = lists.to(torch.int32).contiguous()
        reading.lists, reading.owners, reading.longest = lists.data_ptr(), *lists.shape[::2]
        reading.page = page
        reading.first = keys.shape[1] if first is None else first
    elif read is not None:
        read = read.contiguous()
        reading.read, reading.owners = read.data_ptr(), len(read)
    out = torch.empty(nodes, heads, values.shape[2])
    reading.values, reading.value_width = values.data_ptr(), values.shape[2]
    reading.value_head, reading.value_row = values.stride()[:2]
    reading.scale = scale
    reading.out, reading.weights = out.data_ptr(), library.address(weights)
    reading.log_sums = library.address(log_sums)
    if not library.library().ft_read(reading, library.threads()):
        raise MemoryError("no memory for attention")
    return out


def products(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """q (H, n, D) with all rows of keys (KV, rows, D) -> (H, n, rows) float32. The keys' rows may
    lie in columns. `out`: where they go, a part of the rows of a contiguous tensor.
    """
    q = q.float().contiguous()
    reading = _reading(q, keys)
    if out is None:
        out = torch.empty(*q.shape[:2], keys.shape[1])
    assert out.dtype is torch.float32 and out.shape == (*q.shape[:2], keys.shape[1])
    assert out.stride(2) == 1 and out.stride(0) == q.shape[1] * out.stride(1)
    reading.out, reading.out_row = out.data_ptr(), out.stride(1)
    library.library().ft_products(reading, library.threads())
    return out


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` highest scores (..., rows) float32, ascending, int32; of equal ones
    the first.
    """
    scores = scores.contiguous()
    places = torch.empty(*scores.shape[:-1], count, dtype=torch.int32)
    sizes = places.numel() // count, scores.shape[-1], count
    where = scores.data_ptr(), *sizes, places.data_ptr()
    if not library.library().ft_highest(*where, library.threads()):
        raise MemoryError("no memory for a choice of rows")
    return places


def best(
    rows: torch.Tensor, k: int, log_sums: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` best of rows of logits (N, V) float32, best first and of equals the first, and where
    they stand (N, k each). V is at least k. Into `log_sums` (N,) float32 go the logs of the rows'
    sums of exponentials.
    """
    count, width = rows.shape
    values = torch.empty(count, k)
    places = torch.empty(count, k, dtype=torch.int32)
    library.library().ft_best(
        rows.data_ptr(),
        rows.stride(0),
        *(count, width, k),
        values.data_ptr(),
        places.data_ptr(),
        library.address(log_sums),
        library.threads(),
    )
    return values, places.long()


def masked(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits (V,) float32, and -inf in the place of those that `allowed`, bool (V,), leaves out."""
    out = torch.empty_like(logits)
    where = logits.data_ptr(), allowed.data_ptr(), len(logits), out.data_ptr()
    library.library().ft_masked(*where)
    return out


def draw(weights: torch.Tensor, u: float) -> int:
    """The first place at which the sum of weights (V,) float32 up to it is above `u`, in [0, 1), of
    the whole sum; -1 where they have no finite sum above 0.
    """
    token: int = library.library().ft_draw(weights.data_ptr(), len(weights), u)
    return token


def nucleus(logits: torch.Tensor, share: float) -> torch.Tensor | None:
    """The fewest largest of logits (V,) float32 whose chances reach `share`, and -inf in the place
    of all others; None where rounding could decide which they are.
    """
    kept = torch.empty_like(logits)
    found = library.library().ft_nucleus(logits.data_ptr(), len(logits), share, kept.data_ptr())
    return kept if found else None
