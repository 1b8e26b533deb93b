"""Finds the rows that matter by a few channels in a few bits, and reads these alone.

Of each key head those `channels` of the largest products with queries are known from texts. A
row's label is what its key has there, in `bits`; queries are cut down the same way, and each query
head reads the `budget` rows of the largest products. The first layers read everything.

Paper: Yang et al., Post-Training Sparse Attention with Double Sparsity, arXiv:2408.07092
Guarantee: lossy: queries leave rows out; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text, and a table of the model's channels
Trains: a table of channels, by `foretell train channels`; one ships for smollm2
Try: --model smollm2 --kv double-sparsity
Differs:
- heads that share a key head share its channels, and their products count by their mean
- products are of rotated queries and keys, which the published code calls qk; its `q` and `k` are
left out
- the first row and the newest are always among those read; `sinks` and `recent` 0: they are not
- a prompt is read as a whole
- labels are rounded to `bits` and kept as wide as keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import OneOf, Range
from foretell.kv.base import KV, bytes_of, check_budget
from foretell.kv.select.base import Selecting
from foretell.kv.select.channels import table_for
from foretell.ops.attention import Attention
from foretell.ops.row_attention import Listed, highest_positions, query_products

if TYPE_CHECKING:
    from foretell.core.model import Model

BITS = (2, 4, 8, 16)
AT_ONCE = 64  # committed rows that are labelled together


@dataclass(frozen=True)
class DoubleSparsity(KV):
    """Counts of rows, channels and layers."""

    role = "selector"

    budget: int = 128  # rows that a query head reads
    # of a key head that rows are found by; as many as it has: no table is read
    channels: Annotated[int, Range(1)] = 16
    # of a label's numbers: 2, 4, 8, or 16: they are as keys are
    bits: Annotated[int, OneOf(BITS)] = 4
    dense: Annotated[int, Range(0)] = 2  # first layers, which read everything
    sinks: Annotated[int, Range(0)] = 1  # first rows, which are always read
    recent: Annotated[int, Range(0)] = 1  # last rows, the same
    calibration: str = ""  # table of channels, a file or a folder; else the one that ships

    def __post_init__(self) -> None:
        super().__post_init__()
        reserved_rows = f"{self.sinks} first rows, {self.recent} last ones and one more"
        check_budget("double-sparsity", self.budget, self.sinks + self.recent + 1, reserved_rows)

    def build_policy(self, target: Model) -> Labelled:
        self.check_target(target)
        chosen_channels = None
        if any(shape is not None and shape[1] > self.channels for shape in target.layout):
            channel_table = table_for(target, self.calibration, "kv=double-sparsity")
            chosen_channels = channel_table[..., : self.channels].to(target.device)
        return Labelled(
            self.dense,
            self.budget,
            self.bits,
            chosen_channels,
            sinks=self.sinks,
            recent=self.recent,
        )


@dataclass
class Labelled(Selecting):
    """Labels are what keys alone decide; so rows get theirs late, and none changes at any
    length.
    """

    budget: int
    bits: int
    channels: torch.Tensor | None  # (L, KV, r); None: all of them
    sinks: int = 1
    recent: int = 1
    labels: dict[int, torch.Tensor] = field(default_factory=dict)  # of each layer (KV, r, rows)
    labelled: int = 0  # first rows that have labels

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.labels, self.labelled = {}, 0

    @property
    def bytes(self) -> int:
        return bytes_of(self.labels.values())

    def change_rows(self, cache: Any) -> None:
        self._label_rows(cache.k, cache.base)

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        end = cache.base + len(nodes)
        if cache.length >= self.prompt and end >= self.labelled + AT_ONCE:
            self._label_rows(cache.k, end)

    def _label_rows(self, keys: Sequence[torch.Tensor], end: int) -> None:
        layers = range(self.dense, len(keys))
        self.labels = {layer: self._all_labels(layer, keys[layer][:, :end]) for layer in layers}
        self.labelled = end

    def _all_labels(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Labels (KV, r, n) of all these rows (KV, n, D)."""
        new_labels = self.label_numbers(layer, keys[:, self.labelled :]).transpose(1, 2)
        known_labels = self.labels.get(layer)
        return (
            new_labels.contiguous()
            if known_labels is None
            else torch.cat([known_labels, new_labels], 2)
        )

    def label_numbers(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of queries or keys (KV, n, D) in the chosen channels, rounded (KV, n, r)."""
        if self.channels is not None:
            channel_indices = self.channels[layer][:, None].expand(-1, numbers.shape[1], -1)
            numbers = numbers.gather(-1, channel_indices)
        return numbers if self.bits == 16 else round_to_bits(numbers, self.bits)

    def watches_job(self, job: Any) -> bool:
        return super().watches_job(job) and job.start + len(job.tokens) > self.budget

    def select_rows(self, job: Any, attention: Attention) -> Listed:
        row_scores = self._score_rows(attention)
        row_count = row_scores.shape[-1]
        # Along a path rows stand in the order of its tokens, so counts of rows are those of tokens.
        if attention.mask is None:
            row_scores[..., : self.sinks] = torch.inf
            row_scores[..., row_count - self.recent :] = torch.inf
        else:
            seen_mask = (attention.mask > -torch.inf).expand(row_scores.shape[0], -1, -1)
            sink_mask = seen_mask.cumsum(-1) <= self.sinks
            recent_mask = seen_mask.flip(-1).cumsum(-1).flip(-1) <= self.recent
            row_scores = row_scores.masked_fill(sink_mask | recent_mask, torch.inf).masked_fill(
                ~seen_mask, -torch.inf
            )
        return Listed(highest_positions(row_scores, self.budget), 1, row_count)

    def _score_rows(self, attention: Attention) -> torch.Tensor:
        """Products of each query's label with those of all rows (H, n, rows)."""
        keys = attention.keys
        queries = attention.q.unflatten(0, (len(keys), -1)).flatten(1, 2)
        # One call for both: they are few, and a call takes longer than their numbers do.
        labels = self.label_numbers(
            attention.layer, torch.cat([queries, keys[:, self.labelled :]], 1)
        )
        query_labels, new_labels = labels.split(
            [queries.shape[1], labels.shape[1] - queries.shape[1]], 1
        )
        query_labels = query_labels.reshape(*attention.q.shape[:2], -1)
        wide_type = torch.promote_types(query_labels.dtype, torch.float32)
        score_shape = (*query_labels.shape[:2], keys.shape[1])
        row_scores = torch.empty(score_shape, dtype=wide_type, device=keys.device)
        if self.labelled:
            known_labels = self.labels[attention.layer].transpose(1, 2)
            query_products(query_labels, known_labels, row_scores[..., : self.labelled])
        query_products(query_labels, new_labels, row_scores[..., self.labelled :])
        return row_scores


def round_to_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest of 2 ** bits numbers, from the least to the largest of each row (..., r)."""
    row_minimum, row_maximum = numbers.aminmax(dim=-1, keepdim=True)
    step_size = (row_maximum - row_minimum) / (2**bits - 1)
    codes = ((numbers - row_minimum) / step_size.clamp(min=torch.finfo(numbers.dtype).tiny)).round()
    return row_minimum + codes * step_size
