"""The part of one forward that belongs to one cache.

A job knows the new nodes, where their cache rows go, and who sees whom. Models call `write` and
`attend` (or read the same facts, as backends do); they never look into a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.ops.attention import Attention, Bias, LayerQuery, merge_parts, self_part


@dataclass(slots=True, frozen=True)
class RowMemory:
    """The memory in which a backend stores new rows, after `start` others: keys and values
    (layers, KV, rows, D). Every new node sees the first `common` rows, new ones too.
    """

    start: int
    common: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, eq=False)
class Job:
    """n new nodes, stored after `start` cache rows that are there already.

    A node sees every committed row, and of the scratch rows (those after the committed ones) what
    `seen` says, bool (n, scratch rows); None: a chain, each node sees all rows before it.
    """

    cache: Any  # the cache.cache.Cache whose rows these are
    tokens: list[int]
    scratch_positions: list[int]  # of all scratch rows in the text, the new nodes at the end
    start: int
    seen: torch.Tensor | None
    rows: list[int]  # new nodes (0-based) whose logits are wanted
    first: int  # the tree's node that new node 0 is; below 0: committed tokens precede the tree
    taps: tuple[int, ...] = ()
    layers: tuple[Any, ...] | None = None
    states: torch.Tensor | None = None  # (n, E), see types.Ask
    # Hidden states of the new nodes that an earlier forward of their first layers found, by tap.
    known: Mapping[int, torch.Tensor] = field(default_factory=dict)
    features: torch.Tensor | None = None  # (n, E) of a model that feeds on the target's states
    follow: int = 0  # levels that the model may go on by, see types.Ask
    masks: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def positions(self) -> list[int]:
        """Positions of the new nodes in the text."""
        return self.scratch_positions[len(self.scratch_positions) - len(self.tokens) :]

    @property
    def enters_first_layer(self) -> bool:
        """Whether layer 0 runs first, so that states given for nodes stand for embeddings."""
        return self.layers is None or self.layers[:1] in ((0,), ((0, "attention"),))

    @property
    def rows_before(self) -> int:
        """Cache rows that the new nodes attend to, those that it shares with others included."""
        shared_rows = sum(segment.end - segment.start for segment in self.cache.segments)
        return self.start + int(shared_rows)

    @property
    def forward_key(self) -> Any:
        """A key that the jobs of one forward have in common: the layers, how they are entered, and
        how far they go on.
        """
        return self.layers, self.layers is None or self.states is None, self.follow

    @property
    def compacted(self) -> bool:
        """Whether some rows were evicted, so that windows are not counts of rows."""
        return self.cache.positions is not None

    @property
    def plain(self) -> bool:
        """Whether this is an ordinary forward over ordinary cache rows.

        Most backends compute nothing else: what a policy, a prefix or a given state asks for
        would be lost without a word.
        """
        return self.suits(layers=False, segments=False)

    @property
    def watched(self) -> bool:
        """Whether its cache's policy computes the attention of its nodes."""
        policy = self.cache.policy
        return policy is not None and policy.watches_job(self)

    def suits(
        self, layers: bool, segments: bool, watched: bool = False, canvases: bool = False
    ) -> bool:
        """Whether a backend can run this job that can (or cannot) run a part of the layers or
        enter with states, read segments, leave attention to policies, compute positions of a
        canvas.
        """
        cache = self.cache
        all_layers = self.layers is None and self.states is None
        layers = layers and all(isinstance(layer, int) for layer in self.layers or ())
        is_ordinary = self.features is None and (
            not self.watched or (watched and not cache.segments)
        )
        return is_ordinary and (all_layers or layers) and (segments or not cache.segments)

    def lay_out(self) -> RowMemory:
        """For backends, of a cache whose layers have one shape: its own memory, or a copy."""
        return RowMemory(self.start, self.cache.base, self.cache.keys[0], self.cache.values[0])

    def take_back(self, rows: RowMemory) -> None:
        """Takes new rows over that were stored in a copy. By default there is none."""

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k, v (KV, n, D) of the new nodes; returns keys and values (KV, start + n, D)."""
        end = self.start + len(self.tokens)
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys[:, self.start : end] = k
        values[:, self.start : end] = v
        return keys[:, :end], values[:, :end]

    def attend(self, query: LayerQuery) -> torch.Tensor:
        """Attention of the new nodes -> (n, H, D), whose keys and values it stores before."""
        keys, values = self.write(query.layer, query.k, query.v)
        if self.watched:
            return self.by_policy(query.over(keys, values, self.biased_mask(query)))
        if self.cache.segments:
            row_parts = self._attend_parts(query, keys, values)
            return merge_parts(row_parts).to(query.q.dtype)
        if query.bias is not None:
            return query.attend(keys, values, self.biased_mask(query), grouped=False)
        mask = self.mask(query.window, query.q.dtype, query.mask_repeats)
        return query.attend(keys, values, mask)

    def by_policy(self, attention: Attention) -> torch.Tensor:
        """Attention of a layer as the policy computes it -> (n, H, D)."""
        node_outputs: torch.Tensor = self.cache.policy.attend_job(self, attention)
        return node_outputs

    def attend_with(
        self, query: LayerQuery, own_row: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """`attend` of nodes that see one more key and value each (KV, n, D), which they alone see
        and which are not stored.
        """
        assert self.cache.policy is None or self.cache.policy.plain
        keys, values = self.write(query.layer, query.k, query.v)
        row_parts = self._attend_parts(query, keys, values)
        own_part = self_part(query.q, *own_row, query.scale)
        return merge_parts([*row_parts, own_part]).to(query.q.dtype)

    def _attend_parts(
        self, query: LayerQuery, keys: torch.Tensor, values: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Attention over the cache's own rows and over each segment, see `partial_attention`."""
        attention = query.over(keys, values, self.biased_mask(query))
        row_parts = [attention.part()]
        for segment in self.cache.segments:
            positions = range(segment.start, segment.end)
            segment_mask = self.prefix_mask(segment.start, segment.end, query.window, query.q.dtype)
            segment_mask = self._add_bias(segment_mask, query, positions)
            segment_rows = segment.k[query.layer], segment.v[query.layer]
            row_parts.append(attention.over(*segment_rows, segment_mask))
        return row_parts

    # --- who sees whom

    def mask(self, window: int | None, dtype: torch.dtype, times: int = 1) -> torch.Tensor | None:
        """Additive (times * n, start + n), 0 or -inf; None where every node sees all rows.

        `window`: positions a node sees back, itself included.
        """
        if window is not None and max(self.scratch_positions, default=0) < window:
            window = None
        mask_key = (window, times)
        if mask_key not in self.masks:
            self.masks[mask_key] = self._additive_mask(self._visible_rows(window), dtype, times)
        return self.masks[mask_key]

    def _visible_rows(self, window: int | None) -> torch.Tensor | None:
        """Bool (n, start + n); None: every node sees all."""
        node_count, scratch_start = len(self.tokens), self.cache.base
        if node_count == 1 and self.seen is None and window is None:
            return None
        row_count = self.start + node_count
        visible_mask = torch.ones(node_count, row_count, dtype=torch.bool)
        if self.seen is None:
            visible_mask = visible_mask.tril_(self.start)
        else:
            visible_mask[:, scratch_start:] = self.seen
        if window is not None:
            row_positions = torch.tensor([*self.cache.row_positions(), *self.scratch_positions])
            node_positions = torch.tensor(self.positions)
            visible_mask &= node_positions[:, None] - row_positions[None, :] < window
        return visible_mask

    def _additive_mask(
        self, visible_mask: torch.Tensor | None, dtype: torch.dtype, times: int
    ) -> torch.Tensor | None:
        if visible_mask is None:
            return None
        mask = torch.where(visible_mask, 0.0, -torch.inf).to(self.cache.device, dtype)
        return mask if times == 1 else mask.repeat(times, 1)

    def biased_mask(self, query: LayerQuery) -> torch.Tensor | None:
        """The mask over the cache's own rows with the bias added: (n, rows) or (heads, n, rows)."""
        mask = self.mask(query.window, query.q.dtype)
        if query.bias is None:  # of every layer, so no positions are listed for nothing
            return mask
        return self._add_bias(mask, query, [*self.cache.row_positions(), *self.scratch_positions])

    def prefix_mask(
        self, start: int, end: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The mask over rows of the shared positions `start` to `end`, which every node follows."""
        if window is None:
            return None
        distances = torch.tensor(self.positions)[:, None] - torch.arange(start, end)[None, :]
        return self._additive_mask(distances < window, dtype, 1)

    def _add_bias(
        self, mask: torch.Tensor | None, query: LayerQuery, columns: Sequence[int]
    ) -> torch.Tensor | None:
        if query.bias is None:
            return mask
        bias_mask = self._bias_mask(query.bias, list(columns), query.q.dtype)
        return bias_mask if mask is None else bias_mask + mask

    def _bias_mask(self, bias: Bias, columns: list[int], dtype: torch.dtype) -> torch.Tensor:
        node_positions = torch.tensor(self.positions, device=self.cache.device)
        row_positions = torch.tensor(columns, device=self.cache.device)
        return bias(node_positions, row_positions).to(dtype)


def join_entry_states(
    jobs: Sequence[Job],
    embed: Callable[[Sequence[int]], torch.Tensor],
    place: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = lambda states, positions: states,
) -> torch.Tensor | None:
    """(T, E): the states that asks gave of the jobs' nodes, and `embed`dings of those without.

    None: there are only such. `place` adds what the model learnt of positions to embeddings, and to
    states that enter layer 0 in their stead.
    """
    if all(job.states is None for job in jobs):
        return None
    state_parts = []
    for job in jobs:
        state_count = 0 if job.states is None else len(job.states)
        embedded_count = len(job.tokens) - state_count
        if embedded_count:
            embeddings = embed(job.tokens[:embedded_count])
            state_parts.append(place(embeddings, job.positions[:embedded_count]))
        if job.states is not None:
            states = job.states
            if job.enters_first_layer:
                states = place(states, job.positions[embedded_count:])
            state_parts.append(states)
    return torch.cat([part.to(state_parts[0]) for part in state_parts])
