"""Rows of a text that is edited: what stood after an edit is kept, and moved to where it is now.

    text    0 ........ start | stop ........ n          rows 0 .. start-1 stay as they are,
    edited  0 ........ start | fresh | .......... n'    those of `stop` on move by n' - n

A key is held as it was computed, with the position it was computed at. The key where its token
stands now is made from that in one turn, however many edits there were: nothing adds up, and a text
that is put back has its rows back, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from foretell.cache.policy import Segment

Layers = Sequence[torch.Tensor]  # of each layer (KV, n, D)


class Move(Protocol):
    """Moves keys of every layer (KV, n, D) from the positions `at` (n,) to others."""

    def __call__(
        self, layers: Layers, old_positions: torch.Tensor, new_positions: torch.Tensor
    ) -> Layers: ...


@dataclass(frozen=True)
class Edited:
    """Rows of consecutive tokens as they were computed. Never changed in place."""

    tokens: tuple[int, ...]
    at: torch.Tensor  # (n,) the positions that its keys were computed at
    k: Layers
    v: Layers
    states: Mapping[int, torch.Tensor]  # tapped hidden states (n, E), see TappedStates

    @staticmethod
    def from_segment(segment: Segment) -> Edited:
        """Rows that stand where they were computed."""
        row_positions = torch.arange(segment.start, segment.end)
        return Edited(segment.tokens, row_positions, segment.k, segment.v, segment.states)

    def copy_part(self, start: int, stop: int) -> Edited:
        """Rows of the tokens `start` to `stop` - 1, in memory of their own."""
        row_range = slice(start, stop)
        k, v = (join_layers([[layer[:, row_range] for layer in side]]) for side in (self.k, self.v))
        states = {tap: tap_states[row_range].clone() for tap, tap_states in self.states.items()}
        return Edited(self.tokens[row_range], self.at[row_range], k, v, states)

    def replace_tokens(self, start: int, stop: int, fresh: Edited) -> Edited:
        """These rows with `fresh` in the place of the tokens `start` to `stop` - 1."""
        prefix_range, suffix_range = slice(0, start), slice(stop, len(self.tokens))
        k, v = (
            join_layers(
                [
                    [layer[:, prefix_range] for layer in old_layers],
                    new_layers,
                    [layer[:, suffix_range] for layer in old_layers],
                ]
            )
            for old_layers, new_layers in ((self.k, fresh.k), (self.v, fresh.v))
        )
        states = {
            tap: torch.cat([tap_states[prefix_range], fresh.states[tap], tap_states[suffix_range]])
            for tap, tap_states in self.states.items()
        }
        tokens = (*self.tokens[prefix_range], *fresh.tokens, *self.tokens[suffix_range])
        return Edited(
            tokens,
            torch.cat([self.at[prefix_range], fresh.at, self.at[suffix_range]]),
            k,
            v,
            states,
        )

    def to_segment(self, move: Move) -> Segment:
        """The segment that a text can begin with: all rows, keys where their tokens stand now."""
        new_positions = torch.arange(len(self.tokens))
        moved_rows = (self.at != new_positions).nonzero()[:, 0]
        k = self.k
        if len(moved_rows):
            k = join_layers([k])
            old_keys = [layer[:, moved_rows] for layer in self.k]
            for layer, keys in zip(
                k, move(old_keys, self.at[moved_rows], new_positions[moved_rows]), strict=True
            ):
                layer[:, moved_rows] = keys
        return Segment(self.tokens, 0, k, self.v, self.states)


def part_of(segment: Segment, start: int, end: int) -> Segment:
    """The part of a segment between two positions of the text, in the segment's own memory."""
    row_range = slice(start - segment.start, end - segment.start)
    k, v = ([layer[:, row_range] for layer in side] for side in (segment.k, segment.v))
    states = {tap: tap_states[row_range] for tap, tap_states in segment.states.items()}
    return Segment(segment.tokens[row_range], start, k, v, states)


def join_layers(parts: Sequence[Layers]) -> list[torch.Tensor]:
    """Rows of every layer, those of all parts one after the other; layers of one shape lie in one
    tensor.
    """
    layer_sizes = [(layer.shape[0], layer.shape[2]) for layer in parts[0]]
    row_count = sum(part[0].shape[1] for part in parts)
    joined_layers: list[torch.Tensor] = [parts[0][0]] * len(layer_sizes)
    for heads, width in set(layer_sizes):
        layer_indices = [
            layer_index for layer_index, size in enumerate(layer_sizes) if size == (heads, width)
        ]
        joined_buffer = parts[0][0].new_empty(len(layer_indices), heads, row_count, width)
        for rows, layer_index in zip(joined_buffer, layer_indices, strict=True):
            torch.cat([part[layer_index] for part in parts], 1, out=rows)
            joined_layers[layer_index] = rows
    return joined_layers
