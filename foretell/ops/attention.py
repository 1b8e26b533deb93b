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


@dataclass(slots=True)
class LayerQuery:
    """What a layer asks for of a job's n new nodes: their attention to all rows that they see.

    `q` (H, n, D), `k` and `v` (KV, n, D) are the nodes' own. `window`: positions that a node sees
    back, itself included; None: all.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    bias: Bias | None = None

    def part(self, first: int, end: int) -> LayerQuery:
        """The query of the nodes `first` to `end` - 1."""
        q, k, v = (rows[:, first:end] for rows in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def over(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> Attention:
        """Its attention to these rows, keys and values (KV, rows, D)."""
        return Attention(
            self.layer, self.q, keys, values, mask, self.scale, self.softcap, self.sinks
        )

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        grouped: bool = True,
    ) -> torch.Tensor:
        """Computes that attention -> (n, H, D), see `attend`."""
        return attend(self.q, keys, values, mask, self.scale, self.softcap, self.sinks, grouped)

    @property
    def mask_repeats(self) -> int:
        """How many times `attend` reads a mask (n, rows): of each head that shares keys."""
        return len(self.q) // len(self.k) if self.softcap is None and self.sinks is None else 1


@dataclass(frozen=True)
class Attention:
    """The attention of new nodes in one layer: q (H, n, D) over rows `keys` and `values` (KV, rows,
    D).

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

    def full_output(self) -> torch.Tensor:
        """Computes the ordinary attention -> (n, H, D)."""
        mask = self.mask
        is_grouped = (
            self.softcap is None and self.sinks is None and (mask is None or mask.dim() == 2)
        )
        if is_grouped and mask is not None:
            mask = mask.repeat(len(self.q) // len(self.keys), 1)
        rows = (self.keys, self.values, mask)
        return attend(self.q, *rows, self.scale, self.softcap, self.sinks, is_grouped)

    def weights(self) -> torch.Tensor:
        """The weight that each query gives to each key (H, n, rows), in float32 or wider."""
        return weights_of(self.q, self.keys, self.mask, self.scale, self.softcap, self.sinks)

    def scores(self) -> torch.Tensor:
        """The score of each key for each query (H, n, rows), before the softmax."""
        return _score_keys(self.q, self.keys, self.mask, self.scale, self.softcap)

    def in_type(self, dtype: torch.dtype) -> Attention:
        """Converts queries, keys and values to another number format."""
        q, keys, values = self.q.to(dtype), self.keys.to(dtype), self.values.to(dtype)
        return replace(self, q=q, keys=keys, values=values)

    @property
    def quickly(self) -> bool:
        """Whether `part` reads the rows as they are, without a copy in float32."""
        return _reads_directly(self.keys, self.values, self.softcap, self.sinks)

    def part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes this attention as a part for `merge_parts`. Sinks belong to this part."""
        rows = (self.keys, self.values, self.mask)
        return partial_attention(self.q, *rows, self.scale, self.softcap, self.sinks)

    def over(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the part of the same queries over rows that stand elsewhere."""
        return partial_attention(self.q, keys, values, mask, self.scale, self.softcap)

    def among(self, keys: torch.Tensor, values: torch.Tensor, first_count: int = 0) -> Attention:
        """Adds further rows, which every node sees, after the `first_count` ones."""
        mask = self.mask
        if mask is not None:
            visible_mask = mask.new_zeros(*mask.shape[:-1], keys.shape[1])
            mask = torch.cat([mask[..., :first_count], visible_mask, mask[..., first_count:]], -1)
        all_keys = torch.cat([self.keys[:, :first_count], keys, self.keys[:, first_count:]], 1)
        all_values = torch.cat(
            [self.values[:, :first_count], values, self.values[:, first_count:]], 1
        )
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
    """Computes attention: q (H, n, D) over k, v (KV, L, D), mask additive or None -> (n, H, D).

    Without softcap and sinks, `grouped`, the mask is (H / KV * n, L), repeated for the heads that
    share keys; else it is (n, L) or (H or 1, n, L).
    """
    heads, node_count, width = q.shape
    if grouped and softcap is None and sinks is None:
        # Heads that share keys become more queries of one head: no copy of the keys, and far
        # quicker on a CPU.
        grouped_queries = q.reshape(1, len(k), -1, width)
        attention_output = F.scaled_dot_product_attention(
            grouped_queries, k[None], v[None], mask, scale=scale
        )
        return attention_output.reshape(heads, node_count, -1).transpose(
            0, 1
        )  # on GPUs it may lie by positions
    key_weights = weights_of(q, k, mask, scale, softcap, sinks).to(q.dtype)
    return (
        (key_weights.view(len(k), -1, key_weights.shape[-1]) @ v)
        .view(heads, node_count, -1)
        .transpose(0, 1)
    )


def weights_of(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight that each query gives to each key (H, n, L), in float32 or wider."""
    scores = _score_keys(q, k, mask, scale, softcap)
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=wide_dtype)
    sink_scores = sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sink_scores], -1).softmax(-1, dtype=wide_dtype)[..., :-1]


def attend_jointly(parts: Sequence[Attention]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes one attention over the rows of all parts, in each of which the same nodes may have
    other queries: (output (n, H, D), numbers (H, n, rows of the first part), totals (H, n, 1)).

    A query gives each row of the first part its number, divided by its total. All are in float32 or
    wider. Sinks are those of the first part. A node must see something in some part.
    """
    first_part = parts[0]
    parts = [part for part in parts if part is first_part or part.keys.shape[1]]
    if first_part.q.shape[1] <= FEW and all(part.quickly for part in parts):
        return _attend_by_library(parts)
    wide_dtype = torch.promote_types(first_part.q.dtype, torch.float32)
    parts = [part.in_type(wide_dtype) for part in parts]
    part_scores = [part.scores() for part in parts]
    part_maxima = [scores.amax(-1, keepdim=True) for scores in part_scores]
    if first_part.sinks is not None:
        part_maxima.append(first_part.sinks.to(wide_dtype).view(-1, 1, 1).expand_as(part_maxima[0]))
    score_maximum = torch.stack(part_maxima).amax(0)
    for scores in part_scores:  # in place: they are large
        scores.sub_(score_maximum).exp_()
    part_sums = [weights.sum(-1, keepdim=True) for weights in part_scores]
    if first_part.sinks is not None:
        part_sums.append((part_maxima[-1] - score_maximum).exp())
    weighted_values = []
    for part, weights in zip(parts, part_scores, strict=True):
        grouped = weights.view(len(part.keys), -1, weights.shape[-1])
        weighted_values.append((grouped @ part.values).view(*weights.shape[:2], -1))
    weight_sum = torch.stack(part_sums).sum(0)
    attention_output = (torch.stack(weighted_values).sum(0) / weight_sum).transpose(0, 1)
    return attention_output, part_scores[0], weight_sum


def _attend_by_library(
    parts: Sequence[Attention],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `attend_jointly` over bfloat16 rows, which are not converted: for few nodes that
    would take longest. The numbers add up to 1.
    """
    part_outputs = [part.part() for part in parts]
    first_part = parts[0]
    total_log_sum = torch.stack([log_sum for _, log_sum in part_outputs]).logsumexp(0).T[..., None]
    row_weights = library.key_products(first_part.q, first_part.keys) * first_part.scale
    if first_part.mask is not None:
        row_weights += first_part.mask
    row_weights.sub_(total_log_sum).exp_()
    return merge_parts(part_outputs), row_weights, torch.ones_like(total_log_sum)


def _score_keys(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """The scores (H, n, L) of all keys."""
    heads, node_count, width = q.shape
    scores = (q.reshape(len(k), -1, width) @ k.transpose(1, 2)).view(heads, node_count, -1)
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
    """Computes attention over a part of the rows: (output (n, H, D), log of the sum of exponentials
    (n, H)).

    Both in float32 or wider. A node that sees nothing here has log-sum -inf and output 0.
    """
    heads, node_count, _ = q.shape
    if _reads_directly(k, v, softcap, sinks):
        log_sums = torch.empty(node_count, heads)
        return library.attend_rows(q, k, v, scale, mask, log_sums=log_sums), log_sums
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = _score_keys(
        q.to(wide_dtype),
        k.to(wide_dtype),
        None if mask is None else mask.to(wide_dtype),
        scale,
        softcap,
    )
    if sinks is not None:
        sink_scores = sinks.to(wide_dtype).reshape(-1, 1, 1).expand(-1, node_count, 1)
        log_sum = torch.cat([scores, sink_scores], -1).logsumexp(-1)
    else:
        log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.clamp_min(torch.finfo(wide_dtype).min)[..., None]).exp()
    part_output = (weights.view(len(k), -1, weights.shape[-1]) @ v.to(wide_dtype)).view(
        heads, node_count, -1
    )
    return part_output.transpose(0, 1), log_sum.transpose(0, 1)


def _reads_directly(
    k: torch.Tensor, v: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None
) -> bool:
    """Whether the C library reads these rows, without a copy of them in float32."""
    is_plain = softcap is None and sinks is None
    return is_plain and k.dtype is torch.bfloat16 and library.takes_rows(k, v)


def self_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the part over one key of each node's own, which no other node sees: q (H, n, D), k
    and v (KV, n, D).
    """
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    group_size = len(q) // len(k)
    keys, values = (part.to(wide_dtype).repeat_interleave(group_size, 0) for part in (k, v))
    scores = (q.to(wide_dtype) * keys).sum(-1) * scale
    return values.transpose(0, 1), scores.transpose(0, 1)


def merge_parts(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Merges the attentions over parts, each (output (n, H, D), log-sum (n, H)), into that over all
    rows.

    The merge of FlashDecoding and Hydragen (arXiv:2402.05099, section 3.1).
    """
    log_sums = torch.stack([log_sum for _, log_sum in parts])
    part_shares = log_sums.softmax(0)
    outputs = torch.stack([out for out, _ in parts])
    return (part_shares[..., None] * outputs).sum(0)
