"""Attention of new nodes over cache rows, whole or in parts that are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from foretell.native import rows as library

FEW = 8  # nodes for which converting rows takes longer than reading them

# (query positions (n,), key positions (rows,)) -> added to the scores, (heads or 1, n, rows)
Bias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True, frozen=True)
class Attention:
    """What new nodes ask of one layer: q (H, n, D) over rows `keys` and `values` (KV, rows, D).

    `mask`: additive, (n, rows) or (H or 1, n, rows); None: every node sees all rows.
    """

    layer: int
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """The ordinary attention -> (n, H, D)."""
        mask = self.mask
        grouped = self.softcap is None and self.sinks is None and (mask is None or mask.dim() == 2)
        if grouped and mask is not None:
            mask = mask.repeat(len(self.q) // len(self.keys), 1)
        rows = (self.keys, self.values, mask)
        return attend(self.q, *rows, self.scale, self.softcap, self.sinks, grouped)

    def weights(self) -> torch.Tensor:
        """What each query gives to each key (H, n, rows), in float32 or wider."""
        return weights_of(self.q, self.keys, self.mask, self.scale, self.softcap, self.sinks)

    def scores(self) -> torch.Tensor:
        """What each query makes of each key (H, n, rows), before they are weighed."""
        return _scores(self.q, self.keys, self.mask, self.scale, self.softcap)

    def in_type(self, dtype: torch.dtype) -> Attention:
        """The same with queries, keys and values of another number format."""
        q, keys, values = self.q.to(dtype), self.keys.to(dtype), self.values.to(dtype)
        return replace(self, q=q, keys=keys, values=values)

    @property
    def quickly(self) -> bool:
        """Whether `part` reads the rows as they are, without a copy in float32."""
        return _quickly(self.keys, self.values, self.softcap, self.sinks)

    def part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """It as one of the parts that `merge` takes. Sinks belong to this one."""
        rows = (self.keys, self.values, self.mask)
        return partial_attention(self.q, *rows, self.scale, self.softcap, self.sinks)

    def over(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same part over rows that stand elsewhere."""
        return partial_attention(self.q, keys, values, mask, self.scale, self.softcap)

    def among(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> Attention:
        """The same with further rows, which every node sees, behind the `first` ones."""
        mask = self.mask
        if mask is not None:
            seen = mask.new_zeros(*mask.shape[:-1], keys.shape[1])
            mask = torch.cat([mask[..., :first], seen, mask[..., first:]], -1)
        all_keys = torch.cat([self.keys[:, :first], keys, self.keys[:, first:]], 1)
        all_values = torch.cat([self.values[:, :first], values, self.values[:, first:]], 1)
        return replace(self, keys=all_keys, values=all_values, mask=mask)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    grouped: bool = True,
) -> torch.Tensor:
    """q (H, n, D) over k, v (KV, L, D), mask additive or None -> (n, H, D).

    Without softcap and sinks, `grouped`, the mask is (H / KV * n, L), repeated for the heads that
    share keys; else it is (n, L) or (H or 1, n, L).
    """
    heads, new, width = q.shape
    if grouped and softcap is None and sinks is None:
        # Heads that share keys become more queries of one head: no copy of the keys, and far
        # quicker on a CPU.
        queries = q.reshape(1, len(k), -1, width)
        out = F.scaled_dot_product_attention(queries, k[None], v[None], mask, scale=scale)
        return out.reshape(heads, new, -1).transpose(0, 1)  # on GPUs it may lie by positions
    p = weights_of(q, k, mask, scale, softcap, sinks).to(q.dtype)
    return (p.view(len(k), -1, p.shape[-1]) @ v).view(heads, new, -1).transpose(0, 1)


def weights_of(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each query gives to each key (H, n, L), in float32 or wider."""
    scores = _scores(q, k, mask, scale, softcap)
    wide = torch.promote_types(q.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=wide)
    sink = sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sink], -1).softmax(-1, dtype=wide)[..., :-1]


def jointly(parts: Sequence[Attention]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One attention over the rows of all parts, in each of which the same nodes may have other
    queries: (output (n, H, D), numbers (H, n, rows of the first part), totals (H, n, 1)).

    A query gives each row of the first part its number, divided by its total. All are in float32 or
    wider. Sinks are those of the first part. A node must see something in some part.
    """
    first = parts[0]
    parts = [part for part in parts if part is first or part.keys.shape[1]]
    if first.q.shape[1] <= FEW and all(part.quickly for part in parts):
        return _jointly_by_library(parts)
    wide = torch.promote_types(first.q.dtype, torch.float32)
    parts = [part.in_type(wide) for part in parts]
    numbers = [part.scores() for part in parts]
    tops = [scores.amax(-1, keepdim=True) for scores in numbers]
    if first.sinks is not None:
        tops.append(first.sinks.to(wide).view(-1, 1, 1).expand_as(tops[0]))
    top = torch.stack(tops).amax(0)
    for scores in numbers:  # in place: they are large
        scores.sub_(top).exp_()
    totals = [weights.sum(-1, keepdim=True) for weights in numbers]
    if first.sinks is not None:
        totals.append((tops[-1] - top).exp())
    mixed = []
    for part, weights in zip(parts, numbers, strict=True):
        grouped = weights.view(len(part.keys), -1, weights.shape[-1])
        mixed.append((grouped @ part.values).view(*weights.shape[:2], -1))
    total = torch.stack(totals).sum(0)
    out = (torch.stack(mixed).sum(0) / total).transpose(0, 1)
    return out, numbers[0], total


def _jointly_by_library(
    parts: Sequence[Attention],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same over bfloat16 rows, which are not converted: for few nodes that would take longest.
    The numbers add up to 1.
    """
    found = [part.part() for part in parts]
    first = parts[0]
    total = torch.stack([log_sum for _, log_sum in found]).logsumexp(0).T[..., None]
    numbers = library.products(first.q, first.keys) * first.scale
    if first.mask is not None:
        numbers += first.mask
    numbers.sub_(total).exp_()
    return merge(found), numbers, torch.ones_like(total)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """(H, n, L)."""
    heads, new, width = q.shape
    scores = (q.reshape(len(k), -1, width) @ k.transpose(1, 2)).view(heads, new, -1)
    scores *= scale  # in place: new memory of this size costs more than the product
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask
    return scores


def partial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the rows: (output (n, H, D), log of the sum of exponentials (n, H)).

    Both in float32 or wider. A node that sees nothing here has log-sum -inf and output 0.
    """
    heads, new, _ = q.shape
    if _quickly(k, v, softcap, sinks):
        sums = torch.empty(new, heads)
        return library.read(q, k, v, scale, mask, log_sums=sums), sums
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(
        q.to(wide), k.to(wide), None if mask is None else mask.to(wide), scale, softcap
    )
    if sinks is not None:
        sink = sinks.to(wide).reshape(-1, 1, 1).expand(-1, new, 1)
        log_sum = torch.cat([scores, sink], -1).logsumexp(-1)
    else:
        log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.clamp_min(torch.finfo(wide).min)[..., None]).exp()
    out = (weights.view(len(k), -1, weights.shape[-1]) @ v.to(wide)).view(heads, new, -1)
    return out.transpose(0, 1), log_sum.transpose(0, 1)


def _quickly(
    k: torch.Tensor, v: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None
) -> bool:
    """Whether the C library reads these rows, without a copy of them in float32."""
    plain = softcap is None and sinks is None
    return plain and k.dtype is torch.bfloat16 and library.takes(k, v)


def own_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over one key of each node's own, which no other node sees: q (H, n, D), k and v (KV,
    n, D).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    times = len(q) // len(k)
    keys, values = (part.to(wide).repeat_interleave(times, 0) for part in (k, v))
    scores = (q.to(wide) * keys).sum(-1) * scale
    return values.transpose(0, 1), scores.transpose(0, 1)


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The attention over all rows from that over parts, each (output (n, H, D), log-sum (n, H)).

    The merge of FlashDecoding and Hydragen (arXiv:2402.05099, section 3.1).
    """
    log_sums = torch.stack([log_sum for _, log_sum in parts])
    shares = log_sums.softmax(0)
    outputs = torch.stack([out for out, _ in parts])
    return (shares[..., None] * outputs).sum(0)
