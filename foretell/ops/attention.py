"""Attention of one job's nodes over one cache's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from foretell.core.cache import Job


def attend_job(
    job: Job,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Of a job's new nodes q (H, n, D), k, v (KV, n, D): stores k and v, attends to all rows -> (n,
    H, D).
    """
    times = len(q) // len(k) if softcap is None and sinks is None else 1
    keys, values = job.write(layer, k, v)
    return attend(q, keys, values, job.mask(window, q.dtype, times), scale, softcap, sinks)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q (H, n, D) over k, v (KV, L, D), mask additive or None -> (n, H, D).

    The mask is (n, L) with a softcap or sinks; else (H / KV * n, L), repeated for the heads that
    share keys.
    """
    (heads, new, width), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    if softcap is None and sinks is None:
        # Heads that share keys become more queries of one head: no copy of the keys, and far
        # quicker on a CPU.
        grouped = q.reshape(1, len(k), -1, width)
        out = F.scaled_dot_product_attention(grouped, k[None], v[None], mask, scale=scale)
        return out.view(heads, new, -1).transpose(0, 1)
    scores = (q.reshape(len(k), -1, width) @ k.transpose(1, 2) * scale).view(heads, new, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.reshape(-1, 1, 1).expand(-1, new, 1)
        p = torch.cat([scores, sink], -1).softmax(-1, dtype=wide)[..., :-1].to(q.dtype)
    else:
        p = scores.softmax(-1, dtype=wide).to(q.dtype)
    return (p.view(len(k), -1, p.shape[-1]) @ v).view(heads, new, -1).transpose(0, 1)
