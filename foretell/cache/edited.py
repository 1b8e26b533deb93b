"""Rows of a text that is edited: what stood behind an edit is kept, and moved to where it is now.

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

    def __call__(self, layers: Layers, at: torch.Tensor, to: torch.Tensor) -> Layers: ...


@dataclass(frozen=True)
class Edited:
    """Rows of consecutive tokens as they were computed. Never changed in place."""

    tokens: tuple[int, ...]
    at: torch.Tensor  # (n,) the positions that its keys were computed at
    k: Layers
    v: Layers
    states: Mapping[int, torch.Tensor]  # tapped hidden states (n, E), see TappedStates

    @staticmethod
    def computed(segment: Segment) -> Edited:
        """Rows that stand where they were computed."""
        at = torch.arange(segment.start, segment.end)
        return Edited(segment.tokens, at, segment.k, segment.v, segment.states)

    def part(self, start: int, stop: int) -> Edited:
        """Those of the tokens `start` to `stop` - 1, in memory of their own."""
        rows = slice(start, stop)
        k, v = (joined([[layer[:, rows] for layer in side]]) for side in (self.k, self.v))
        states = {tap: held[rows].clone() for tap, held in self.states.items()}
        return Edited(self.tokens[rows], self.at[rows], k, v, states)

    def spliced(self, start: int, stop: int, fresh: Edited) -> Edited:
        """With `fresh` in the place of the tokens `start` to `stop` - 1."""
        before, behind = slice(0, start), slice(stop, len(self.tokens))
        k, v = (
            joined([[layer[:, before] for layer in old], new, [layer[:, behind] for layer in old]])
            for old, new in ((self.k, fresh.k), (self.v, fresh.v))
        )
        states = {
            tap: torch.cat([held[before], fresh.states[tap], held[behind]])
            for tap, held in self.states.items()
        }
        tokens = (*self.tokens[before], *fresh.tokens, *self.tokens[behind])
        return Edited(tokens, torch.cat([self.at[before], fresh.at, self.at[behind]]), k, v, states)

    def segment(self, move: Move) -> Segment:
        """What a text can begin with: all rows, their keys where their tokens stand now."""
        now = torch.arange(len(self.tokens))
        moved = (self.at != now).nonzero()[:, 0]
        k = self.k
        if len(moved):
            k = joined([k])
            old = [layer[:, moved] for layer in self.k]
            for layer, keys in zip(k, move(old, self.at[moved], now[moved]), strict=True):
                layer[:, moved] = keys
        return Segment(self.tokens, 0, k, self.v, self.states)


def part_of(segment: Segment, start: int, end: int) -> Segment:
    """The part of a segment between two positions of the text, in the segment's own memory."""
    rows = slice(start - segment.start, end - segment.start)
    k, v = ([layer[:, rows] for layer in side] for side in (segment.k, segment.v))
    states = {tap: held[rows] for tap, held in segment.states.items()}
    return Segment(segment.tokens[rows], start, k, v, states)


def joined(parts: Sequence[Layers]) -> list[torch.Tensor]:
    """Rows of every layer, those of all parts one behind the other; layers of one shape lie in one
    tensor.
    """
    sizes = [(layer.shape[0], layer.shape[2]) for layer in parts[0]]
    count = sum(part[0].shape[1] for part in parts)
    out: list[torch.Tensor] = [parts[0][0]] * len(sizes)
    for heads, width in set(sizes):
        places = [place for place, size in enumerate(sizes) if size == (heads, width)]
        made = parts[0][0].new_empty(len(places), heads, count, width)
        for rows, place in zip(made, places, strict=True):
            torch.cat([part[place] for part in parts], 1, out=rows)
            out[place] = rows
    return out
