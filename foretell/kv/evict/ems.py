"""Evicts what no head needs, and merges what is much like a kept row into it, head by head.

A row's score is the larger of two: the mean attention it got of all nodes, and that of the last
`window` ones; both are brought to one mean first. In each key head the rows of the highest scores
are centres, the next ones are merged each into the centre most like it, and those that are like
none, or matter to nobody, go. A centre's score becomes the sum of what it took in.

Paper: Li et al., EMS: Adaptive Evict-then-Merge Strategy for Head-wise KV Cache Compression Based
on Global-Local Importance, arXiv:2412.08521
Guarantee: lossy: rows are given up and merged; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- the paper's thresholds are not known here: `mass`, `rho` and `tau` are our choice
- every head keeps as many centres; how many rows are merged differs by head, as in the paper
- likeness is the product of the cosines of keys and values, each at least 0: two negative ones do
not make a likeness
- keys are compared and merged as they were cached, and the result stands at its centre's position
- after the prompt the last nodes are those since the last eviction, at most `window`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.nn.functional import max_pool1d, normalize

from foretell.core.settings import Odd, Range
from foretell.kv.base import KV, Attended, check_budget, top_rows

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Ems(KV):
    """Counts of rows and tokens, and shares."""

    role = "evictor"

    budget: int = 256  # rows of a layer's head
    # tokens between two evictions; 0: only a prompt is evicted from
    every: Annotated[int, Range(0)] = 64
    # last tokens, whose attention is the local score and whose rows stay
    window: Annotated[int, Range(1)] = 32
    sinks: Annotated[int, Range(0)] = 4  # first rows, which stay
    # neighbours that a local score is the largest of
    kernel: Annotated[int, Odd(1)] = 7
    # of all scores: rows after those that reach it together go
    mass: Annotated[float, Range(0, 1, open_low=True)] = 0.95
    rho: Annotated[float, Range(0)] = 1.0  # rows that are merged for each that stays, at most
    # the least likeness of rows that are merged; above 1 none is
    tau: Annotated[float, Range(0)] = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        min_value = self.sinks + self.window + 1
        check_budget("ems", self.budget, min_value, "sinks, window and a row beside them")

    def build_policy(self, target: Model) -> Merging:
        self.check_target(target)
        return Merging(self.budget, self.every, settings=self)


@dataclass
class Merging(Attended):
    """Adds up two parts of what rows receive: what all nodes give, and what the last ones give."""

    settings: Ems = field(default_factory=Ems)
    # Of each layer the places in the text of the rows that stayed (KV, kept).
    places: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.places = {}

    def counts_token(self, token_position: int) -> bool:
        return token_position < self.first_eviction or self.every > 0

    def room_left(self, length: int) -> int:
        eviction_room = super().room_left(length)
        return (
            eviction_room - self.settings.window
            if eviction_room > self.settings.window
            else eviction_room
        )

    def split_scores(self, job: Any, given_scores: torch.Tensor) -> torch.Tensor:
        node_position = self.job_position(job)
        in_window = self.next_change(node_position) - node_position <= self.settings.window
        return torch.cat(
            [given_scores, given_scores if in_window else torch.zeros_like(given_scores)]
        )

    def evict_rows(self, cache: Any) -> None:
        surviving_rows, merged_rows = [], []
        places, received = {}, {}
        for layer in range(len(cache.layout)):
            keys, values = (part[layer][:, : cache.base] for part in (cache.k, cache.v))
            row_positions = self._row_positions(cache, layer)
            scores = self.score_rows(self.received[layer], cache.length - row_positions)
            centres, merged_indices = self.classify_rows(scores)
            *new_rows, centre_scores = merge_rows(
                keys, values, scores, centres, merged_indices, self.settings.tau
            )
            surviving_rows.append(centres)
            merged_rows.append(new_rows)
            places[layer] = row_positions.gather(1, centres)
            # As if all nodes that saw the centre had given it its score.
            received[layer] = torch.cat(
                [centre_scores * (cache.length - places[layer]), 0 * centre_scores]
            )
        cache.keep_rows(surviving_rows)
        for layer, new_rows in enumerate(merged_rows):
            for buffer, new_buffer in zip((cache.k[layer], cache.v[layer]), new_rows, strict=True):
                buffer[:, : cache.base] = new_buffer
        self.places, self.received = places, received

    def _row_positions(self, cache: Any, layer: int) -> torch.Tensor:
        """The places in the text of a layer's rows (KV, base)."""
        held_positions = self.places.get(layer)
        head_count = cache.layout[layer][0]
        if held_positions is None:
            held_positions = torch.zeros(head_count, 0, dtype=torch.long, device=cache.device)
        new_positions = torch.arange(
            cache.length - cache.base + held_positions.shape[1], cache.length
        )
        return torch.cat(
            [held_positions, new_positions.to(held_positions.device).expand(head_count, -1)], 1
        )

    def score_rows(self, received: torch.Tensor, seen_counts: torch.Tensor) -> torch.Tensor:
        """Scores (KV, base) of rows by what they received (2 * KV, base); `seen_counts`: nodes that
        saw each.
        """
        overall_scores, local_scores = received.chunk(2)
        # Rows that were evicted from before have no more local nodes than came since.
        local_nodes = (
            self.settings.window if not self.places else min(self.settings.window, self.every)
        )
        local_scores = local_scores / local_nodes
        overall_scores = overall_scores / seen_counts
        kernel_width, window_start = (
            self.settings.kernel,
            local_scores.shape[1] - self.settings.window,
        )
        pooled_scores = max_pool1d(
            local_scores[:, None, :window_start], kernel_width, 1, kernel_width // 2
        )[:, 0]
        local_scores = torch.cat([pooled_scores, local_scores[:, window_start:]], 1)
        aligned_scores = overall_scores * (
            local_scores.mean(1, keepdim=True) / overall_scores.mean(1, keepdim=True)
        )
        return torch.maximum(aligned_scores, local_scores)

    def classify_rows(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The centres (KV, budget) of each head, in order, and the rows to be merged (KV, n): -1
        where it has fewer than others.
        """
        row_count = scores.shape[1]
        forced_scores = scores.clone()
        forced_scores[:, : self.settings.sinks] = torch.inf
        forced_scores[:, row_count - self.settings.window :] = torch.inf
        row_order = top_rows(forced_scores, row_count)
        sorted_scores = scores.gather(1, row_order)
        reached_mass = sorted_scores.cumsum(1) - sorted_scores  # before each row
        matter_mask = reached_mass < self.settings.mass * scores.sum(1, keepdim=True)
        max_rows = min(row_count, int((1 + self.settings.rho) * self.budget))
        merge_candidates = row_order[:, self.budget : max_rows].where(
            matter_mask[:, self.budget : max_rows], -1
        )
        return row_order[:, : self.budget].sort(-1).values, merge_candidates


def merge_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    scores: torch.Tensor,
    centres: torch.Tensor,
    merged_indices: torch.Tensor,
    tau: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values (KV, budget, D) and scores (KV, budget) of the centres, with the other rows
    (KV, n), but those of -1, in the centres that they are most like, if at least `tau`.

    Means are weighted by the scores (KV, rows); a key's length is the mean length.
    """
    wide_type = torch.promote_types(keys.dtype, torch.float32)
    gathered_indices = torch.cat([centres, merged_indices.clamp(min=0)], 1)

    def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered_rows = rows.gather(
            1, gathered_indices[..., None].expand(-1, -1, rows.shape[-1])
        ).to(wide_type)
        return gathered_rows.split([centres.shape[1], merged_indices.shape[1]], 1)

    (key, other_key), (value, other_value) = split_rows(keys), split_rows(values)
    (score, other_score) = (part[..., 0] for part in split_rows(scores[..., None]))
    pair_likeness = _cosines(other_key, key) * _cosines(other_value, value)
    likeness, nearest_centre = pair_likeness.max(-1)
    merge_mask = (merged_indices >= 0) & (likeness >= tau)
    # What each centre (KV, budget, n) takes of each row.
    weights = torch.zeros_like(pair_likeness.transpose(1, 2))
    weights.scatter_(1, nearest_centre[:, None], (other_score * merge_mask)[:, None])
    taken_scores = weights.sum(-1)
    total_scores = score + taken_scores

    def weighted_mean(centre_values: torch.Tensor, other_values: torch.Tensor) -> torch.Tensor:
        return (score[..., None] * centre_values + weights @ other_values) / total_scores[..., None]

    key_lengths = weighted_mean(
        key.norm(dim=-1, keepdim=True), other_key.norm(dim=-1, keepdim=True)
    )
    key_directions = normalize(
        weighted_mean(normalize(key, dim=-1), normalize(other_key, dim=-1)), dim=-1
    )
    merged_mask = (taken_scores > 0)[..., None]
    new_key = torch.where(merged_mask, key_lengths * key_directions, key)
    new_value = torch.where(merged_mask, weighted_mean(value, other_value), value)
    return new_key.to(keys.dtype), new_value.to(values.dtype), total_scores


def _cosines(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """(KV, n, m), those below 0 as 0."""
    cosines = normalize(ours, dim=-1) @ normalize(theirs, dim=-1).transpose(1, 2)
    return cosines.clamp(min=0)
